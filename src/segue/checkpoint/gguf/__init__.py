"""Conversion of a GGUF file to what the engine loads."""
