"""Resolves a model's name or directory, and loads its weights: sources, hub, caches and file formats."""
