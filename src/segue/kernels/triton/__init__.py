"""Triton kernels. Imported only where a CUDA device is: Triton comes with CUDA builds of torch.

Neighbouring kernels overlap by programmatic dependent launch: each waits (`begin`) before it touches memory
that the one before it writes, and only then lets the next one start (`let_next_start`). So a kernel may
count on everything before its predecessor, too.
"""
