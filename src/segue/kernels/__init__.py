"""Fused operations, one module per operation, each with its plain-torch reference."""
