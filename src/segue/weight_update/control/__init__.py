"""Rank 0's control of weight updates: the calls, the state machine and its session; does not import torch."""
