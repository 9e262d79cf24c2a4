"""GEMMs of few rows by a weight: they stream the weight once, with split-K where N gives too few programs.

Operands are swapped: rows of the weight fill the tensor cores' 64 rows, tokens their columns. The fastest
tile and split were measured for each shape (`bench/tune_gemm.py`) and are stored in `gemm.json`; shapes that
are not in there use cuBLAS.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from segue.kernels.triton.launch import launch_options, pdl_launch_dependents, pdl_wait

TABLE = Path(__file__).parent / "gemm.json"
MAX_ROWS = 256


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """The tile, split and launch options of one GEMM."""

    tma: bool  # whether TMA loads the tiles, not threads
    block_m: int  # tokens
    block_n: int  # rows of the weight
    block_k: int
    splits: int  # splits of K; more than one gives split-K partials
    stages: int
    warps: int


@triton.jit
def _store_tile(out, acc, bias, n, m, num_rows, size, split, SPLITS: tl.constexpr, BIAS: tl.constexpr):
    if BIAS:
        if split == 0:
            acc += tl.load(bias + n).to(tl.float32)[:, None]
    at = out + (split * num_rows + m[None, :]).to(tl.int64) * size + n[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=m[None, :] < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def _gemm(
    x,
    weight,
    bias,
    out,
    num_rows,
    size,
    depth,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    split = tl.program_id(1)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    k = split * (depth // SPLITS) + tl.arange(0, BK)
    weights = weight + n[:, None].to(tl.int64) * depth + k[None, :]
    tokens = x + m[None, :].to(tl.int64) * depth + k[:, None]
    pdl_wait(PDL)
    acc = tl.zeros((BN, BM), tl.float32)
    for i in tl.range(0, depth // SPLITS // BK, num_stages=STAGES):
        w = tl.load(weights + i * BK)
        t = tl.load(tokens + i * BK, mask=m[None, :] < num_rows, other=0.0)
        acc = tl.dot(w, t, acc)
    pdl_launch_dependents(PDL)
    _store_tile(out, acc, bias, n, m, num_rows, size, split, SPLITS, BIAS)


@triton.jit(do_not_specialize=["num_rows"])
def _gate_up_silu(
    x,
    weight,
    out,
    num_rows,
    size,
    depth,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    r = tl.arange(0, BN)
    half: tl.constexpr = BN // 2
    first = tl.program_id(0) * half
    n = first + r % half + (r // half) * size  # half of the rows are of the gate, half of the up projection
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    weights = weight + n[:, None].to(tl.int64) * depth + k[None, :]
    tokens = x + m[None, :].to(tl.int64) * depth + k[:, None]
    pdl_wait(PDL)
    acc = tl.zeros((BN, BM), tl.float32)
    for i in tl.range(0, depth // BK, num_stages=STAGES):
        w = tl.load(weights + i * BK)
        t = tl.load(tokens + i * BK, mask=m[None, :] < num_rows, other=0.0)
        acc = tl.dot(w, t, acc)
    pdl_launch_dependents(PDL)
    gate, up = tl.split(tl.permute(tl.reshape(acc, (2, half, BM)), (1, 2, 0)))
    at = out + m[None, :].to(tl.int64) * size + (first + tl.arange(0, half))[:, None]
    tl.store(at, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=m[None, :] < num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def _gemm_tma(
    x,
    weight,
    bias,
    out,
    num_rows,
    size,
    depth,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    first_n = tl.program_id(0) * BN
    split = tl.program_id(1)
    first_m = tl.program_id(2) * BM
    first_k = split * (depth // SPLITS)
    pdl_wait(PDL)
    acc = tl.zeros((BN, BM), tl.float32)
    for i in tl.range(0, depth // SPLITS // BK, num_stages=STAGES):
        w = weight.load([first_n, first_k + i * BK])
        t = x.load([first_m, first_k + i * BK])
        acc = tl.dot(w, t.T, acc)
    pdl_launch_dependents(PDL)
    n = first_n + tl.arange(0, BN)
    m = first_m + tl.arange(0, BM)
    _store_tile(out, acc, bias, n, m, num_rows, size, split, SPLITS, BIAS)


def gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, may_split: bool, dtype: torch.dtype | None = None
) -> Tensor:
    """Returns `x @ weight.T + bias`, `[M, N]`.

    Args:
        x: `[M, K]`.
        weight: `[N, K]`.
        bias: `[N]`.
        may_split: the result may be split-K partials, float32 `[S, M, N]`, which the caller adds up.
        dtype: of the result, by default that of `x`; float32 keeps the precision of the accumulation.
    """
    plan = choose(*x.shape, weight.shape[0], x.dtype, may_split)
    if plan is None:
        if dtype in (None, x.dtype):
            return F.linear(x, weight, bias)
        result = torch.mm(x, weight.T, out_dtype=dtype)
        return result if bias is None else result.add_(bias)
    return run(plan, x, weight, bias, dtype or x.dtype)


def run(plan: GemmPlan, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Run the GEMM with `plan`; returns split-K partials if the plan splits K."""
    (num_rows, depth), size = x.shape, weight.shape[0]
    if plan.splits > 1:
        out = torch.empty((plan.splits, num_rows, size), dtype=torch.float32, device=x.device)
    else:
        out = torch.empty((num_rows, size), dtype=dtype, device=x.device)
    grid = (size // plan.block_n, plan.splits, triton.cdiv(num_rows, plan.block_m))
    kernel = _gemm
    operands: tuple[Tensor | TensorDescriptor, Tensor | TensorDescriptor] = (x, weight)
    if plan.tma:
        kernel = _gemm_tma
        operands = (
            TensorDescriptor.from_tensor(x, [plan.block_m, plan.block_k]),
            TensorDescriptor.from_tensor(weight, [plan.block_n, plan.block_k]),
        )
    options = launch_options(plan.warps, num_rows)
    kernel[grid](
        *operands,
        weight if bias is None else bias,
        out,
        num_rows,
        size,
        depth,
        BM=plan.block_m,
        BN=plan.block_n,
        BK=plan.block_k,
        SPLITS=plan.splits,
        STAGES=plan.stages,
        BIAS=bias is not None,
        **options,
    )
    return out


def gate_up_silu_gemm_small_m(x: Tensor, weight: Tensor) -> Tensor | None:
    """Returns `silu(gate) * up` of `x @ weight.T`, `[M, I]`; None where one kernel is not faster.

    `x` is `[M, K]` with a small M, `weight` is `[2 * I, K]`, gate rows first.
    """
    (num_rows, depth), size = x.shape, weight.shape[0] // 2
    plan = choose(*x.shape, weight.shape[0], x.dtype, False)
    if plan is None or num_rows > 64:
        return None
    out = torch.empty((num_rows, size), dtype=x.dtype, device=x.device)
    _gate_up_silu[(2 * size // plan.block_n, triton.cdiv(num_rows, plan.block_m))](
        x,
        weight,
        out,
        num_rows,
        size,
        depth,
        BM=plan.block_m,
        BN=plan.block_n,
        BK=plan.block_k,
        STAGES=plan.stages,
        **launch_options(plan.warps, num_rows),
    )
    return out


@cache
def choose(num_rows: int, depth: int, size: int, dtype: torch.dtype, may_split: bool) -> GemmPlan | None:
    """Returns the stored plan for a shape, or None to use cuBLAS."""
    if num_rows > MAX_ROWS or dtype != torch.bfloat16:
        return None
    measured = _table().get(torch.cuda.get_device_name(), {}).get(f"{size}x{depth}", {})
    for max_rows, plans in measured.items():
        if num_rows <= int(max_rows):
            plan = plans["split" if may_split else "whole"]
            return GemmPlan(**plan) if plan else None
    return None


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    return table
