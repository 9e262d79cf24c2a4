"""The native dialect: bodies, and what becomes of them."""
