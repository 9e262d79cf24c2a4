"""Batch-invariant GEMMs, for `--deterministic`: a row gets the same bits in any batch.

Each element is one chain of float32 additions over K in ascending order, 16 at a step of the tensor cores. No
tile splits K, and the chain depends neither on the tile nor on which operand fills the tensor cores' rows. So
the tile is chosen for speed by the number of rows (`tests/gpu/test_deterministic.py` compares all tiles).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from segue.errors import ConfigError
from segue.kernels.triton.launch import LATE, pdl_launch_dependents, pdl_wait
from segue.sizes import ceil_div

_GROUP_M = 8  # blocks of tokens whose tiles run at the same time, so that they share the L2 cache
_SMALL_M = 64  # rows up to which the time is that of reading the weight


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile and launch options of a GEMM."""

    block_m: int  # tokens
    block_n: int  # rows of the weight
    block_k: int
    stages: int
    warps: int
    swap: bool = False  # whether rows of the weight, not tokens, fill the tensor cores' 64 rows
    cost: float = 0.0  # time of a program on a full device, relative to the largest tile's


LARGE_M_TILES = (  # from the largest to the smallest
    Tile(128, 256, 64, 4, 8, cost=1.0),
    Tile(128, 128, 64, 5, 8, cost=0.57),
    Tile(64, 128, 128, 4, 4, cost=0.37),
    Tile(64, 64, 128, 5, 4, cost=0.28),
)
# For one program per SM, and for several programs per SM.
SMALL_M_TILES = tuple(Tile(rows, 64, 128, 6, 4, swap=True) for rows in (16, 32, 64))
SMALL_M_LARGE_N_TILES = (
    *(Tile(rows, 64, 128, 4, 4, swap=True) for rows in (16, 32)),
    Tile(64, 128, 128, 4, 4),
)


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
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    GROUP_M: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    blocks, columns = tl.cdiv(num_rows, BM), tl.cdiv(size, BN)
    group = tl.program_id(0) // (GROUP_M * columns)
    group_m = tl.minimum(blocks - group * GROUP_M, GROUP_M)
    within = tl.program_id(0) % (GROUP_M * columns)
    first_m = (group * GROUP_M + within % group_m) * BM
    first_n = within // group_m * BN
    pdl_wait(PDL)
    acc = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    for k in tl.range(0, depth, BK, num_stages=STAGES):  # loads beyond the edges give zeros
        t = x.load([first_m, k])
        w = weight.load([first_n, k])
        if SWAP:
            acc = tl.dot(w, t.T, acc)
        else:
            acc = tl.dot(t, w.T, acc)
    pdl_launch_dependents(PDL)
    m, n = first_m + tl.arange(0, BM), first_n + tl.arange(0, BN)
    if BIAS:
        b = tl.load(bias + n, mask=n < size, other=0.0).to(tl.float32)
        acc += b[:, None] if SWAP else b[None, :]
    if SWAP:
        m, n = m[None, :], n[:, None]
    else:
        m, n = m[:, None], n[None, :]
    at = out + m.to(tl.int64) * size + n
    tl.store(at, acc.to(out.dtype.element_ty), mask=(m < num_rows) & (n < size))


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
        tile = choose(len(x), self.weight.shape[0], num_sms(x.device))
        return run(tile, x, self.weight, bias, self.dtype)


def run(tile: Tile, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns `x @ weight.T + bias`, computed with `tile`."""
    (num_rows, depth), size = x.shape, weight.shape[0]
    out = torch.empty((num_rows, size), dtype=dtype, device=x.device)
    _gemm[(triton.cdiv(num_rows, tile.block_m) * triton.cdiv(size, tile.block_n),)](
        TensorDescriptor.from_tensor(x, [tile.block_m, tile.block_k]),
        TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k]),
        weight if bias is None else bias,
        out,
        num_rows,
        size,
        depth,
        BM=tile.block_m,
        BN=tile.block_n,
        BK=tile.block_k,
        STAGES=tile.stages,
        SWAP=tile.swap,
        GROUP_M=_GROUP_M,
        BIAS=bias is not None,
        PDL=LATE.value,
        launch_pdl=True,
        num_warps=tile.warps,
    )
    return out


@cache
def choose(num_rows: int, size: int, num_sms: int) -> Tile:
    """Returns the fastest tile for a GEMM, according to measurements on an H200."""
    if num_rows <= _SMALL_M:
        several = size > 64 * num_sms
        return next(
            tile for tile in (SMALL_M_LARGE_N_TILES if several else SMALL_M_TILES) if num_rows <= tile.block_m
        )

    def cost(tile: Tile) -> float:
        programs = ceil_div(num_rows, tile.block_m) * ceil_div(size, tile.block_n)
        return tile.cost * ceil_div(programs, num_sms)

    return min(LARGE_M_TILES, key=cost)


@cache
def num_sms(device: torch.device) -> int:
    """Returns the number of streaming multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
