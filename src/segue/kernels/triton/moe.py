"""The experts of a mixture on CUDA: two grouped GEMMs of static shapes, which a graph can capture.

A pair is a token and one of its experts. Few tokens rarely share experts: then a program streams rows of one
pair's expert, and the second GEMM also sums over a token's pairs. The pairs of more tokens are sorted by
expert and split into tiles of one expert each; a last kernel sums over a token's pairs. Pairs are always
added in order, never by atomics, so a replay gives the same bits. The tile configurations were measured for
each shape (`bench/tune_moe.py`) and are stored in `moe.json`. PDL is never early here: the GEMMs fill the
device even for one token, and a successor that starts early and waits on the same SMs costs a third
(measured: 32 against 24 µs).
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from segue.kernels.plan_store import stored_plans
from segue.kernels.triton import moe_gemm
from segue.kernels.triton.launch import device_facts, launch_options
from segue.kernels.triton.moe_routing import sort

TABLE = Path(__file__).parent / "moe.json"


@dataclass(frozen=True, slots=True)
class TileConfig:
    """The tile and launch options of one of the GEMMs."""

    block_n: int  # rows of the weight
    block_k: int
    stages: int
    warps: int
    tma: bool = False  # whether TMA loads the tiles, not threads
    halves: bool = False  # whether a tile that is at most half full runs with half of block_m

    def options(self) -> dict[str, int | bool]:
        """Returns the arguments and launch options that all of the GEMMs' kernels take."""
        tile = {"BN": self.block_n, "BK": self.block_k, "STAGES": self.stages}
        return tile | launch_options(self.warps, None)


@dataclass(frozen=True, slots=True)
class MoEPlan:
    """The configurations of both GEMMs for a number of tokens."""

    block_m: int  # pairs per tile, all of one expert; 1: pairs in the order of tokens, not sorted
    gate_up: TileConfig
    down: TileConfig


def run_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor, plan: MoEPlan | None = None
) -> Tensor:
    """See `segue.layers.moe_backend.MoEBackend`; without `plan` the stored one is used.

    `inner` is the result of the first GEMM, per pair; `parts` is that of the second one, before the sum over
    each token's pairs.
    """
    (num_experts, hidden, size), (num_tokens, per_token) = down.shape, experts.shape
    if plan is None:
        plan = choose(num_tokens, per_token, num_experts, size, hidden, x.dtype)
    if plan.block_m == 1:
        inner = gate_up_by_pair(plan.gate_up, x, gate_up, weights, experts)
        return down_by_token(plan.down, inner, down, experts)
    order, tiles = sort(experts, num_experts, plan.block_m)
    inner = gemm_by_tile(plan.block_m, plan.gate_up, x, gate_up, weights, order, tiles)
    parts = gemm_by_tile(plan.block_m, plan.down, inner, down, None, order, tiles)
    out = torch.empty_like(x)
    moe_gemm.sum_pairs[(num_tokens, triton.cdiv(hidden, moe_gemm.SUM_BLOCK.value))](
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
    config: TileConfig, x: Tensor, weight: Tensor, weights: Tensor, experts: Tensor
) -> Tensor:
    """Run the first GEMM, for few tokens: returns the weighted `silu(gate) * up` of each pair, `[T * k, I]`.

    `x` is `[T, H]`, `weight` `[E, 2 * I, H]`; the routing `weights` and `experts` are `[T, k]`.
    """
    num_experts, rows, hidden = weight.shape
    size = rows // 2
    inner = torch.empty((experts.numel(), size), dtype=x.dtype, device=x.device)
    moe_gemm.gate_up_by_pair[(triton.cdiv(size, config.block_n), experts.numel())](
        x=x,
        weight=weight,
        experts=experts,
        factors=weights,
        inner=inner,
        hidden=hidden,
        size=size,
        num_experts=num_experts,
        K=experts.shape[1],
        **config.options(),
    )
    return inner


def down_by_token(config: TileConfig, inner: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
    """Run the second GEMM, for few tokens, and sum over each token's pairs: `[T, H]`.

    `inner` is `[T * k, I]`, from `gate_up_by_pair`; `weight` is `[E, H, I]`.
    """
    (num_tokens, per_token), (num_experts, hidden, size) = experts.shape, weight.shape
    out = torch.empty((num_tokens, hidden), dtype=inner.dtype, device=inner.device)
    moe_gemm.down_by_token[(triton.cdiv(hidden, config.block_n), num_tokens)](
        inner=inner,
        weight=weight,
        experts=experts,
        out=out,
        size=size,
        hidden=hidden,
        num_experts=num_experts,
        K=per_token,
        **config.options(),
    )
    return out


def gemm_by_tile(
    block_m: int,
    config: TileConfig,
    x: Tensor,
    weight: Tensor,
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
    flat, tile = weight.view(num_experts * rows, depth), [config.block_n, config.block_k]
    if gated and block_m >= 64:  # one TMA load takes rows of the gate and of the up projection
        flat, tile = weight.view(num_experts * 2, size, depth), [2, *tile]

    def tokens(rows: int) -> Tensor | TensorDescriptor:
        """Returns `x` for tiles of `rows` pairs; the first GEMM gathers tokens, so threads load them."""
        by_tma = config.tma and not gated
        return TensorDescriptor.from_tensor(x, [rows, config.block_k]) if by_tma else x

    moe_gemm.gemm_by_tile[(tiles.shape[1] * triton.cdiv(size, config.block_n),)](
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
        **config.options(),
    )
    return out


@cache
def choose(
    num_tokens: int, per_token: int, num_experts: int, size: int, hidden: int, dtype: torch.dtype
) -> MoEPlan:
    """Returns the stored plan for a shape; where none was measured, one that runs on any device.

    `size` is I and `hidden` H. A stored plan serves up to a number of tokens, and the last one more too.
    """
    key = f"{num_experts}x{per_token}x{size}x{hidden}"
    measured = stored_plans(TABLE, device_facts()).get(key, {})
    if dtype == torch.bfloat16:
        for max_tokens, plan in measured.items():
            if num_tokens <= int(max_tokens) or max_tokens == list(measured)[-1]:
                return MoEPlan(plan["block_m"], TileConfig(**plan["gate_up"]), TileConfig(**plan["down"]))
    # The arguments of a TileConfig are block_n, block_k, stages and warps.
    if num_tokens <= 4:
        return MoEPlan(1, TileConfig(8, 256, 2, 4), TileConfig(8, 256, 2, 4))
    wide = dtype == torch.float32
    if wide or num_tokens * per_token <= 32 * num_experts:
        config = TileConfig(32, 32, 2, 4) if wide else TileConfig(64, 64, 3, 4)
        return MoEPlan(16, config, config)
    return MoEPlan(64, TileConfig(64, 64, 3, 4), TileConfig(128, 64, 3, 4))
