"""New weights for a running engine."""
