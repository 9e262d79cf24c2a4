"""Converts a GGUF file to the files that the engine loads."""
