"""Attention backends and the forward context."""
