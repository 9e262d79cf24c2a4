"""Checkpoints, name tables and (later) weight updates."""
