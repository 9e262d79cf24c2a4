"""Tensor parallelism: ranks, process groups, collectives and symmetric memory."""
