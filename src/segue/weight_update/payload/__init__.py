"""Tensors that travel in a request, as pickles or as handles to GPU memory."""
