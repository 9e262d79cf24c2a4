"""One module a fused operation, each with its plain-torch reference."""
