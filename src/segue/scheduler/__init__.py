"""Decides what runs next; pure except for loop.py."""
