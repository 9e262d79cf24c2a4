"""Tensors in the body of a request, by value or as handles to GPU memory."""
