"""Kernels for CPUs with AVX512-BF16, in C++: a compiler on the machine builds them at the first start."""
