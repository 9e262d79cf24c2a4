"""The start and the end of the worker processes, and the way to them."""
