"""The experts of a mixture on CUDA: two grouped GEMMs of static shapes, which a graph can capture.

A pair is a token and one of its experts. Few tokens rarely share experts: then a program streams rows of one
pair's expert, and the second GEMM also sums over a token's pairs. The pairs of more tokens are sorted by
expert and split into tiles of one expert each; a last kernel sums over a token's pairs. Pairs are always
added in order, never by atomics, so a replay gives the same bits. The tile configurations of some shapes were
measured (`bench/tune_moe.py`) and are stored in `moe.json`; those of others are found at the start of an
engine (`plan_timing.py`). PDL is never early here: the GEMMs fill the device even for one token, and a
successor that starts early and waits on the same SMs costs a third (measured: 32 against 24 µs).
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from segue.kernels.fp8 import ExpertWeights, FP8Experts, block_of
from segue.kernels.moe_plan import MoEPlan, MoEShape, TileConfig, default_plan, default_steps
from segue.kernels.plan_store import found_plans, stored_plans
from segue.kernels.triton import moe_gemm
from segue.kernels.triton.launch import device_facts, launch_options
from segue.kernels.triton.moe_routing import CHUNK, sort
from segue.sizes import ceil_div

TABLE = Path(__file__).parent / "moe.json"
KIND = "experts"  # of plans in the cache


def _options(config: TileConfig, weight: ExpertWeights) -> dict[str, Any]:
    """Returns the arguments and launch options that all of the GEMMs' kernels take."""
    tile = {"BN": config.block_n, "BK": config.block_k, "STAGES": config.stages}
    scales, block = (weight.scales, weight.block) if isinstance(weight, FP8Experts) else (None, 0)
    return tile | {"scales": scales, "BLOCK": block} | launch_options(config.warps, None)


def _values(weight: ExpertWeights) -> Tensor:
    """Returns the weight as kernels read it, without its scales."""
    return weight.weight if isinstance(weight, FP8Experts) else weight


def run_experts(
    x: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    weights: Tensor,
    experts: Tensor,
    plan: MoEPlan | None = None,
) -> Tensor:
    """See `segue.layers.moe_backend.MoEBackend`; without `plan` the stored one is used.

    `inner` is the result of the first GEMM, per pair; `parts` is that of the second one, before the sum over
    each token's pairs.
    """
    (num_experts, hidden, size), (num_tokens, per_token) = down.shape, experts.shape
    if plan is None:
        plan = choose(MoEShape(num_experts, per_token, size, hidden, block_of(down)), num_tokens, x.dtype)
    if plan.block_m == 1:
        inner = gate_up_by_pair(plan.gate_up, x, gate_up, weights, experts)
        return down_by_token(plan.down, inner, down, experts)
    order, tiles = sort(experts, num_experts, plan.block_m)
    inner = gemm_by_tile(plan.block_m, plan.gate_up, x, gate_up, weights, order, tiles)
    parts = gemm_by_tile(plan.block_m, plan.down, inner, down, None, order, tiles)
    out = torch.empty_like(x)
    moe_gemm.sum_pairs[(num_tokens, ceil_div(hidden, moe_gemm.SUM_BLOCK.value))](
        parts=parts,
        experts=experts,
        out=out,
        hidden=hidden,
        num_experts=num_experts,
        K=per_token,
        **launch_options(4, num_tokens),
    )
    return out


def gate_up_by_pair(
    config: TileConfig, x: Tensor, weight: ExpertWeights, weights: Tensor, experts: Tensor
) -> Tensor:
    """Run the first GEMM, for few tokens: returns the weighted `silu(gate) * up` of each pair, `[T * k, I]`.

    `x` is `[T, H]`, `weight` `[E, 2 * I, H]`; the routing `weights` and `experts` are `[T, k]`.
    """
    num_experts, rows, hidden = weight.shape
    size = rows // 2
    inner = torch.empty((experts.numel(), size), dtype=x.dtype, device=x.device)
    moe_gemm.gate_up_by_pair[(ceil_div(size, config.block_n), experts.numel())](
        x=x,
        weight=_values(weight),
        experts=experts,
        factors=weights,
        inner=inner,
        hidden=hidden,
        size=size,
        num_experts=num_experts,
        K=experts.shape[1],
        **_options(config, weight),
    )
    return inner


def down_by_token(config: TileConfig, inner: Tensor, weight: ExpertWeights, experts: Tensor) -> Tensor:
    """Run the second GEMM, for few tokens, and sum over each token's pairs: `[T, H]`.

    `inner` is `[T * k, I]`, from `gate_up_by_pair`; `weight` is `[E, H, I]`.
    """
    (num_tokens, per_token), (num_experts, hidden, size) = experts.shape, weight.shape
    out = torch.empty((num_tokens, hidden), dtype=inner.dtype, device=inner.device)
    moe_gemm.down_by_token[(ceil_div(hidden, config.block_n), num_tokens)](
        inner=inner,
        weight=_values(weight),
        experts=experts,
        out=out,
        size=size,
        hidden=hidden,
        num_experts=num_experts,
        K=per_token,
        **_options(config, weight),
    )
    return out


def gemm_by_tile(
    block_m: int,
    config: TileConfig,
    x: Tensor,
    weight: ExpertWeights,
    weights: Tensor | None,
    order: Tensor,
    tiles: Tensor,
) -> Tensor:
    """Run one of the GEMMs, the first one if there are routing `weights`.

    `order` and `tiles` are those of `moe_routing.sort`. The first GEMM takes `x` `[T, H]` and `weight`
    `[E, 2 * I, H]`, the second one the result of the first, `[T * k, I]`, and `[E, H, I]`.

    Returns the weighted `silu(gate) * up` of the pairs in `order`, `[T * k, I]`; or the pairs' outputs in the
    order of tokens, `[T * k, H]`, undefined for pairs of no expert.
    """
    (num_experts, rows, depth), gated = weight.shape, weights is not None
    size = rows // 2 if gated else rows
    out = torch.empty((len(order), size), dtype=x.dtype, device=x.device)
    flat, tile = _values(weight).view(num_experts * rows, depth), [config.block_n, config.block_k]
    if gated and block_m >= 64 and isinstance(weight, Tensor):  # one TMA load takes rows of gate and up
        flat, tile = weight.view(num_experts * 2, size, depth), [2, *tile]

    def tokens(rows: int) -> Tensor | TensorDescriptor:
        """Returns `x` for tiles of `rows` pairs; the first GEMM gathers tokens, so threads load them."""
        by_tma = config.tma and not gated
        return TensorDescriptor.from_tensor(x, [rows, config.block_k]) if by_tma else x

    moe_gemm.gemm_by_tile[(tiles.shape[1] * ceil_div(size, config.block_n),)](
        x=tokens(block_m),
        half_x=tokens(block_m // 2),
        weight=TensorDescriptor.from_tensor(flat, tile) if config.tma else flat,
        order=order,
        tiles=tiles,
        factors=weights,
        out=out,
        num_tiles=tiles.shape[1],
        depth=depth,
        size=size,
        K=len(order) // len(x),  # k in the first GEMM, whose `x` are tokens; 1 in the second one
        BM=block_m,
        HALVES=config.halves,
        TMA=config.tma,
        EVEN=gated and depth % config.block_k == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **_options(config, weight),
    )
    return out


def token_steps(shape: MoEShape) -> set[int]:
    """Returns the numbers of tokens up to which one plan serves, or the pairs are sorted by one kernel."""
    tables = stored_plans(TABLE, device_facts()), found_plans()
    tokens = {int(max_tokens) for table in tables for max_tokens in table.get(shape.key, {})}
    return tokens | {CHUNK // shape.per_token, *default_steps(shape)}


@cache
def choose(shape: MoEShape, num_tokens: int, dtype: torch.dtype) -> MoEPlan:
    """Returns the stored plan for a shape, or that found at the start; else one that runs on any device.

    A plan serves up to a number of tokens, and the last one more too.
    """
    if dtype == torch.bfloat16:
        found = {tokens: by_kind[KIND] for tokens, by_kind in found_plans().get(shape.key, {}).items()}
        plans = stored_plans(TABLE, device_facts()).get(shape.key) or found
        for max_tokens, plan in plans.items():
            if plan and (num_tokens <= int(max_tokens) or max_tokens == list(plans)[-1]):
                return MoEPlan.of(plan)
            if num_tokens <= int(max_tokens):
                break
    return default_plan(shape, num_tokens, is_float32=dtype == torch.float32)
