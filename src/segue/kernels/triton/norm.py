"""RMSNorm fused with its neighbours: the addition to the residual stream, or RoPE and the KV store."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from segue.kernels.fp8 import MAX as FP8_MAX
from segue.kernels.fp8 import FP8Tokens
from segue.kernels.triton.fp8_tokens import empty_tokens, store_quantized
from segue.kernels.triton.gemm import load_split_k, load_splits, sum_splits
from segue.kernels.triton.launch import (
    launch_options,
    loads_stay_first,
    pdl_launch_behind_loads,
    pdl_launch_dependents,
    pdl_wait,
)
from segue.sizes import next_power_of_2

_MAX_LOADED = 128  # numbers that a thread loads before it adds them up; it has 255 registers


@triton.jit
def _load_parts(x, at, stride, inside, SPLITS: tl.constexpr, LOAD_FIRST: tl.constexpr):
    """Returns SPLITS split-K partials, or without LOAD_FIRST their sum, as a tuple; see `load_split_k`."""
    if LOAD_FIRST:
        parts = load_splits(x, at, stride, inside, SPLITS)
    else:
        parts = (load_split_k(x, at, stride, inside, SPLITS),)
    return parts


@triton.jit(do_not_specialize=["num_rows"])
def _add_rms_norm(
    x,
    residual,
    weight,
    normed,
    scales,
    total_out,
    num_rows,
    size,
    eps,
    SPLITS: tl.constexpr,
    LOAD_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Process one row: store the sum of `x` (or its partials) and `residual`, and that sum normalised.

    The sum is rounded to the model's type before the norm, as in the unfused operations. BLOCK is a power of
    two that holds the `size` columns. With LOAD_FIRST all partials are loaded before any is added, since the
    registers have room for them. With `scales` the result, in the model's type, is stored in FP8, and there
    its scale, or those of GROUP columns each. A thread has other columns then, so the squares are added up in
    another order than without, and a few results are rounded to the other neighbour.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    stride = num_rows.to(tl.int64) * size
    parts = _load_parts(x + row * size, columns, stride, inside, SPLITS, LOAD_FIRST)
    if residual is not None:
        added = tl.load(residual + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    pdl_launch_behind_loads(PDL)
    total = sum_splits(parts, SPLITS if LOAD_FIRST else 1)
    if residual is not None:
        total += added
    rounded = total.to(total_out.dtype.element_ty)
    tl.store(total_out + row * size + columns, rounded, mask=inside)
    wide = rounded.to(tl.float32)
    rms = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    result = wide * rms * scale
    if scales is None:
        tl.store(normed + row * size + columns, result, mask=inside)
    else:
        result = result.to(total_out.dtype.element_ty).to(tl.float32)
        store_quantized(result, normed + row * size, scales + row, num_rows, inside, BLOCK, GROUP)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, fp8_block: int | None = None
) -> tuple[Tensor | FP8Tokens, Tensor]:
    """See `segue.kernels.ops.add_rms_norm`; `x` may be split-K partials, float32 `[S, T, N]`."""
    num_rows, size = x.shape[-2], x.shape[-1]
    total = torch.empty((num_rows, size), dtype=weight.dtype, device=x.device)
    in_fp8 = None if fp8_block is None else empty_tokens(num_rows, size, fp8_block, total.dtype, x.device)
    normed = torch.empty_like(total) if in_fp8 is None else in_fp8.values
    block = max(next_power_of_2(size), fp8_block or 0)
    warps, splits = min(8, max(1, block // 512)), x.shape[0] if x.dim() == 3 else 1
    _add_rms_norm[(num_rows,)](
        x=x,
        residual=residual,
        weight=weight,
        normed=normed,
        scales=None if in_fp8 is None else in_fp8.scales,
        total_out=total,
        num_rows=num_rows,
        size=size,
        eps=eps,
        SPLITS=splits,
        LOAD_FIRST=splits * block // (32 * warps) <= _MAX_LOADED,
        BLOCK=block,
        GROUP=fp8_block or 0,
        **launch_options(warps, num_rows),
    )
    return normed if in_fp8 is None else in_fp8, total


_FP8_MAX = tl.constexpr(FP8_MAX)


@triton.jit
def as_stored(x, dtype: tl.constexpr, inverse):
    """Returns `x` in the model's type `dtype`, or with `inverse`, that of its scale, in FP8 like a CPU's."""
    x = x.to(dtype)
    if inverse is not None:
        scaled = x.to(tl.float32) * inverse
        scaled = tl.clamp(scaled, -_FP8_MAX, _FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
        x = scaled.to(tl.float8e4nv)
    return x


@triton.jit(do_not_specialize=["num_tokens"])
def _qk_norm_rope_store(
    qkv,
    qk_weight,
    cosines,
    sines,
    positions,
    slot_mapping,
    query,
    keys,
    values,
    num_tokens,
    eps,
    key_inverse,
    value_inverse,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    LOAD_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Process GROUP adjacent heads of one token, which are all queries, all keys or all values.

    See `qk_norm_rope_store` for the arguments. A head has D elements, loaded as two halves (`low`, `high`),
    because RoPE rotates element i with element i + D / 2. HALF is a power of two that holds one half. Values
    are only copied to the pool. `key_inverse` and `value_inverse` are 1 / scale of a pool in FP8, else None.
    LOAD_FIRST is that of `_add_rms_norm`.
    """
    width: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    groups: tl.constexpr = (HEADS + 2 * KV_HEADS) // GROUP
    token = (tl.program_id(0) // groups).to(tl.int64)  # consecutive programs read adjacent memory
    first = tl.program_id(0) % groups * GROUP
    half: tl.constexpr = D // 2
    d = tl.arange(0, HALF)[None, :]
    inside = d < half
    head = first + tl.arange(0, GROUP)[:, None]
    rotates = first < HEADS + KV_HEADS  # otherwise the heads are values
    # The kernel before may write nothing of this, see `qk_norm_rope_store`. It arrives while that one ends.
    position = tl.load(positions + token).to(tl.int64)
    row = tl.load(slot_mapping + token).to(tl.int64)
    cos = tl.load(cosines + position * half + d, mask=inside & rotates, other=0.0)
    sin = tl.load(sines + position * half + d, mask=inside & rotates, other=0.0)
    if qk_weight is not None:
        low_weight = tl.load(qk_weight + head * D + d, mask=inside & rotates, other=0.0)
        high_weight = tl.load(qk_weight + head * D + half + d, mask=inside & rotates, other=0.0)
    pdl_wait(PDL)
    stride = num_tokens.to(tl.int64) * width
    low_parts = _load_parts(qkv + token * width, head * D + d, stride, inside, SPLITS, LOAD_FIRST)
    high_parts = _load_parts(qkv + token * width, head * D + half + d, stride, inside, SPLITS, LOAD_FIRST)
    loads_stay_first(num_tokens < 0, PDL)
    loaded: tl.constexpr = SPLITS if LOAD_FIRST else 1
    low, high = sum_splits(low_parts, loaded), sum_splits(high_parts, loaded)
    dtype: tl.constexpr = query.dtype.element_ty
    if rotates:
        if qk_weight is not None:
            # Rounds as the unfused operations do: to the model's type before and after the norm.
            low = low.to(dtype).to(tl.float32)
            high = high.to(dtype).to(tl.float32)
            rms = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + eps)[:, None]
            low = low * rms * low_weight
            high = high * rms * high_weight
        rotated_low = low * cos - high * sin
        rotated_high = high * cos + low * sin
        if first < HEADS:
            at = query + token * (HEADS * D) + head * D + d
            tl.store(at, rotated_low.to(dtype), mask=inside)
            tl.store(at + half, rotated_high.to(dtype), mask=inside)
        else:
            of_key = keys + row * (KV_HEADS * D) + (head - HEADS) * D + d
            tl.store(of_key, as_stored(rotated_low, dtype, key_inverse), mask=inside)
            tl.store(of_key + half, as_stored(rotated_high, dtype, key_inverse), mask=inside)
    else:
        of_value = values + row * (KV_HEADS * D) + (head - HEADS - KV_HEADS) * D + d
        tl.store(of_value, as_stored(low, dtype, value_inverse), mask=inside)
        tl.store(of_value + half, as_stored(high, dtype, value_inverse), mask=inside)
    pdl_launch_dependents(PDL)


def qk_norm_rope_store(
    qkv: Tensor,
    qk_weight: Tensor | None,
    eps: float,
    cosines: Tensor,
    sines: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    dtype: torch.dtype,
    scales: tuple[float, float] | None = None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> Tensor:
    """Normalise and rotate queries and keys, store keys and values in the KV pool, and return the queries.

    One kernel launch does all of this for all tokens. Of what it reads, the kernel launched before it may
    write `qkv` alone: the rest is read before that kernel has ended (`docs/gpu.md`, "Neighbours overlap").

    Args:
        qkv: `[T, (num_heads + 2 * num_kv_heads) * head_dim]`, or split-K partials, float32 `[S, T, …]`.
        qk_weight: float32 `[num_heads + num_kv_heads, head_dim]`, each head's norm weight; None: no QK-norm.
        eps: the epsilon of the QK-norm.
        cosines: float32 `[max_position, head_dim / 2]`.
        sines: float32 `[max_position, head_dim / 2]`.
        positions: integers `[T]`.
        slot_mapping: int64 `[T]`, the token rows of the pool to write.
        keys: this layer's key rows of the pool, `[*, num_kv_heads * head_dim]`.
        values: this layer's value rows of the pool, of the same shape.
        dtype: of the model, and of the queries.
        scales: those of keys and values of a pool in FP8; None: the pool is in `dtype`.
        num_heads: number of query heads.
        num_kv_heads: number of key-value heads.
        head_dim: size of a head; even.

    Returns:
        The queries, `[T, num_heads, head_dim]`.
    """
    num_tokens = qkv.shape[-2]
    query = torch.empty((num_tokens, num_heads, head_dim), dtype=dtype, device=qkv.device)
    group = _heads_per_program(num_heads, num_kv_heads)
    half = next_power_of_2(head_dim // 2)
    warps, splits = 1 if group * head_dim <= 512 else 2, qkv.shape[0] if qkv.dim() == 3 else 1
    _qk_norm_rope_store[(num_tokens * (num_heads + 2 * num_kv_heads) // group,)](
        qkv=qkv,
        qk_weight=qk_weight,
        cosines=cosines,
        sines=sines,
        positions=positions,
        slot_mapping=slot_mapping,
        query=query,
        keys=keys,
        values=values,
        num_tokens=num_tokens,
        eps=eps,
        key_inverse=None if scales is None else 1 / scales[0],
        value_inverse=None if scales is None else 1 / scales[1],
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        D=head_dim,
        HALF=half,
        GROUP=group,
        SPLITS=splits,
        LOAD_FIRST=splits * group * 2 * half // (32 * warps) <= _MAX_LOADED,
        **launch_options(warps, num_tokens),
    )
    return query


def _heads_per_program(num_heads: int, num_kv_heads: int) -> int:
    """Returns the heads per program, a power of two that divides both, so no program mixes Q, K and V."""
    common = math.gcd(num_heads, num_kv_heads)
    return min(8, common & -common)  # `common & -common` is the largest power of two that divides it
