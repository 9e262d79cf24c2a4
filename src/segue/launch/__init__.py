"""Starts and stops the worker processes, and connects the frontend with them."""
