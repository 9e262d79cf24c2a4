"""Triton kernels, imported only where there is a CUDA device: Triton comes with CUDA builds of torch.

Consecutive kernels overlap by programmatic dependent launch (PDL): each kernel waits (`pdl_wait`) before it
accesses memory that its predecessor writes, and only then launches its dependents (`pdl_launch_dependents`).
So after the wait the results of all earlier kernels are complete, not only those of the direct predecessor.
"""
