"""Slabs that hold weights, and the memory budget."""
