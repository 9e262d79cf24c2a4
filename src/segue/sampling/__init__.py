"""Samples tokens from logits: pure functions in plain torch."""
