"""Tokenization, detokenization and the public Engine."""
