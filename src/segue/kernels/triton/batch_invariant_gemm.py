"""Batch-invariant GEMMs, for `--deterministic`: a row gets the same bits in any batch.

Each element is one chain of float32 additions over K in ascending order, 16 at a step of the tensor cores. No
tile splits K, and the chain depends neither on the tile nor on which operand fills the tensor cores' rows. So
the tile is chosen for speed by the number of rows (`tests/gpu/test_deterministic.py` compares all tiles).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from segue.errors import ConfigError
from segue.kernels.triton import gemm
from segue.kernels.triton.gemm import GemmPlan
from segue.kernels.triton.launch import num_sms
from segue.sizes import ceil_div

_GROUP_M = 8  # blocks of tokens whose tiles run at the same time, so that they share the L2 cache
_SMALL_M = 64  # rows up to which the time is that of reading the weight


def _plan(block_m: int, block_n: int, block_k: int, stages: int, warps: int, swap: bool = False) -> GemmPlan:
    return GemmPlan(True, block_m, block_n, block_k, 1, stages, warps, swap)


# From the largest tile to the smallest: time of a program on a full device, relative to the largest tile's.
LARGE_M_TILES = {
    _plan(128, 256, 64, 4, 8): 1.0,
    _plan(128, 128, 64, 5, 8): 0.57,
    _plan(64, 128, 128, 4, 4): 0.37,
    _plan(64, 64, 128, 5, 4): 0.28,
}
# For one program per SM, and for several programs per SM.
SMALL_M_TILES = tuple(_plan(rows, 64, 128, 6, 4, swap=True) for rows in (16, 32, 64))
SMALL_M_LARGE_N_TILES = (
    *(_plan(rows, 64, 128, 4, 4, swap=True) for rows in (16, 32)),
    _plan(64, 128, 128, 4, 4),
)


@dataclass(frozen=True, slots=True)
class TritonBatchInvariantGemm:
    """A weight, callable as a batch-invariant GEMM; see `segue.kernels.batch_invariant.Gemm`."""

    weight: Tensor  # [N, K]
    dtype: torch.dtype  # of the results
    num_bytes: int = 0

    @classmethod
    def from_weight(cls, weight: Tensor, dtype: torch.dtype) -> TritonBatchInvariantGemm:
        """Make a GEMM by `weight` `[N, K]` with results in `dtype`.

        Raises:
            ConfigError: the weight is float32, or TMA cannot load rows of its length.
        """
        if weight.dtype == torch.float32 or weight.shape[1] % 8:
            raise ConfigError(
                f"deterministic=True: a weight {list(weight.shape)} is in {weight.dtype}; on CUDA it has to "
                f"be in bfloat16 or float16, and the length of its rows a multiple of 8; use another --dtype "
                f"or leave --deterministic out",
                param="deterministic",
            )
        return cls(weight, dtype)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns `x @ weight.T + bias`, `[M, K] -> [M, N]`."""
        plan = choose(len(x), self.weight.shape[0], num_sms(x.device))
        return run(plan, x, self.weight, bias, self.dtype)


def run(plan: GemmPlan, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns `x @ weight.T + bias`, computed with `plan`."""
    return gemm.run(plan, x, weight, bias, dtype, group_m=_GROUP_M)


@cache
def choose(num_rows: int, size: int, num_sms: int) -> GemmPlan:
    """Returns the fastest plan for a GEMM, according to measurements on an H200."""
    if num_rows <= _SMALL_M:
        tiles = SMALL_M_LARGE_N_TILES if size > 64 * num_sms else SMALL_M_TILES
        return next(plan for plan in tiles if num_rows <= plan.block_m)

    def cost(plan: GemmPlan) -> float:
        programs = ceil_div(num_rows, plan.block_m) * ceil_div(size, plan.block_n)
        return LARGE_M_TILES[plan] * ceil_div(programs, num_sms)

    return min(LARGE_M_TILES, key=cost)
