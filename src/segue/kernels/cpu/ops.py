"""The CPU's kernels as functions of tensors, which are in bfloat16 unless a docstring says otherwise.

Rows are contiguous. All sums are in float32. But for GEMMs, a row gets the same bits in any batch.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from segue.kernels.cpu.build import kernels


def usable(x: Tensor) -> bool:
    """Whether the kernels serve tensors like `x`."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and kernels().library is not None


def _library() -> ctypes.CDLL:
    return cast(ctypes.CDLL, kernels().library)


def gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, invariant: bool = False
) -> Tensor:
    """Returns `x @ weight.T + bias` of `x` `[M, K]` and `weight` `[N, K]`: `[M, N]`, bfloat16 or float32.

    With `invariant` a row gets the same bits in any batch.
    """
    return _gemm(x, weight, bias, weight.shape[0], dtype, gated=False, invariant=invariant)


def gate_up_silu(x: Tensor, weight: Tensor, *, invariant: bool = False) -> Tensor:
    """Returns `silu(x @ gate.T) * (x @ up.T)`, `[M, K] -> [M, I]`.

    `weight` is `[2 * I, K]`, the gate's rows first. With `invariant` a row gets the same bits in any batch.
    """
    return _gemm(x, weight, None, weight.shape[0] // 2, x.dtype, gated=True, invariant=invariant)


def _gemm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    size: int,
    dtype: torch.dtype,
    *,
    gated: bool,
    invariant: bool,
) -> Tensor:
    assert x.is_contiguous() and weight.is_contiguous()
    rows, depth = x.shape
    out = torch.empty(rows, size, dtype=dtype)
    _library().gemm(
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        size,
        depth,
        dtype == torch.float32,
        gated,
        invariant,
        kernels().tiles,
    )
    return out


@dataclass(frozen=True, slots=True)
class CPUBatchInvariantGemm:
    """A weight, callable as a batch-invariant GEMM; see `segue.kernels.batch_invariant.Gemm`."""

    weight: Tensor  # [N, K]
    dtype: torch.dtype  # of the results
    num_bytes: int = 0

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns `x @ weight.T + bias`, `[M, K] -> [M, N]`."""
        return gemm(x, self.weight, bias, self.dtype, invariant=True)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Returns `silu(gate) * up` of `gate_up` `[T, 2 * I]`, gate first: `[T, I]`."""
    assert gate_up.is_contiguous()
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype)
    _library().silu_mul(gate_up.data_ptr(), out.data_ptr(), rows, size)
    return out


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns the normalised sum `x + residual`, and the sum itself, `[T, N]` both; overwrites `residual`.

    `weight` is float32 `[N]`. If `residual` is None, the sum is `x`.
    """
    assert x.is_contiguous() and (residual is None or residual.is_contiguous())
    assert weight.dtype == torch.float32, "Layer.build_derived makes it"
    out = torch.empty_like(x)
    _library().add_rms_norm(
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        *x.shape,
        eps,
    )
    return out, x if residual is None else residual


def norm_rope_store(
    qkv: Tensor,
    weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    """Apply QK-norm and RoPE to `qkv` in place, and store keys and values in the pool.

    Args:
        qkv: `[T, (num_heads + 2 * num_kv_heads) * head_dim]`; head_dim is a multiple of 32.
        weight: of the norms, float32 `[num_heads + num_kv_heads, head_dim]`; None: there is no norm.
        eps: of the norms.
        cos: `[T, 1, head_dim]`, see `ops.rotate`.
        sin: `[T, 1, head_dim]`.
        rows: int64 `[T]`, the tokens' rows in the pool.
        keys: the layer's `KVPool.key_rows`.
        values: the layer's `KVPool.value_rows`.
        num_heads: query heads.
        num_kv_heads: key-value heads.
        head_dim: numbers per head.
    """
    assert qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous() and rows.is_contiguous()
    _library().norm_rope_store(
        qkv.data_ptr(),
        None if weight is None else weight.data_ptr(),
        eps,
        cos.data_ptr(),
        sin.data_ptr(),
        rows.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        qkv.shape[0],
        num_heads,
        num_kv_heads,
        head_dim,
    )
