"""Operations in plain torch, and fused kernels for CUDA in `triton/`."""
