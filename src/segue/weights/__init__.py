"""Checkpoints, name tables and weight updates."""
