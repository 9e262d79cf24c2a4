"""GEMMs by a weight: one kernel, for few rows as well as for the batch-invariant GEMMs.

A GEMM of few rows streams the weight once, with split-K where N gives too few programs. Its operands are
swapped: rows of the weight fill the tensor cores' 64 rows, tokens their columns. The fastest tile and split
of some shapes were measured (`bench/tune_gemm.py`) and are stored in `gemm.json`; those of other shapes are
found at the start of an engine (`plan_timing.py`). Where neither has a plan, cuBLAS computes the GEMM.

A batch-invariant GEMM, for `--deterministic`, gives a row the same bits in any batch. Each element is one
chain of float32 additions over K in ascending order, 16 at a step of the tensor cores. No tile splits K, and
the chain depends neither on the tile nor on which operand fills the tensor cores' rows. So the tile is chosen
for speed by the number of rows (`tests/gpu/test_deterministic.py` compares all tiles).

Here a GEMM is `[M, K]` by a weight `[N, K]`. In the kernels, M is `num_rows`, K is `depth`, and `size` is the
number of columns of the result; a tile has BM tokens, BN rows of the weight and BK of K.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from segue.errors import ConfigError
from segue.kernels.gemm_plan import DeviceFacts, GemmPlan, Kind, fit_stages, tile
from segue.kernels.plan_store import found_plans, lookup, stored_plans
from segue.kernels.triton.launch import device_facts, launch_options, pdl_launch_dependents, pdl_wait
from segue.sizes import ceil_div

TABLE = Path(__file__).parent / "gemm.json"
MAX_ROWS = 256


@triton.jit
def silu_mul_tile(gate, up):
    """Returns `silu(gate) * up`, the activation of the MLP with a gate, in float32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def load_splits(x, at, stride, inside, SPLITS: tl.constexpr):
    """Returns a tuple of SPLITS split-K partials of the same elements, in float32; see `load_split_k`."""
    parts: tl.tuple = (tl.load(x + at, mask=inside, other=0.0).to(tl.float32),)
    for split in tl.static_range(1, SPLITS):
        parts += (tl.load(x + split * stride + at, mask=inside, other=0.0).to(tl.float32),)
    return parts


@triton.jit
def sum_splits(parts, SPLITS: tl.constexpr):
    """Returns the sum of a tuple of SPLITS tensors, in order.

    With `pdl_launch_behind_loads` or `loads_stay_first` between `load_splits` and this function, no load
    waits for another one. Otherwise Triton 3.8 has few of them under way at a time.
    """
    total = parts[0]
    for split in tl.static_range(1, SPLITS):
        total += parts[split]
    return total


@triton.jit
def load_split_k(x, at, stride, inside, SPLITS: tl.constexpr):
    """Returns elements of the sum of SPLITS split-K partials, in order; or with 1, of an ordinary tensor.

    `at` are the elements' offsets from the pointer `x`, and `inside` masks them; partials are `stride` apart.
    """
    return sum_splits(load_splits(x, at, stride, inside, SPLITS), SPLITS)


@triton.jit
def grouped_tile(tile, num_rows, size, BM: tl.constexpr, BN: tl.constexpr, GROUP_M: tl.constexpr):
    """Returns the first row and column of tile number `tile` of a result `[num_rows, size]`.

    GROUP_M blocks of rows run together and share the L2 cache: the tiles of a group have consecutive numbers,
    column by column.
    """
    blocks, columns = tl.cdiv(num_rows, BM), tl.cdiv(size, BN)
    group = tile // (GROUP_M * columns)
    group_m = tl.minimum(blocks - group * GROUP_M, GROUP_M)
    within = tile % (GROUP_M * columns)
    return (group * GROUP_M + within % group_m) * BM, within // group_m * BN


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
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
    SWAP: tl.constexpr,
    GATED: tl.constexpr,
    GROUP_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one tile of a GEMM, or with SPLIT of one of its split-K partials; see `run`.

    `x` and `weight` are TMA descriptors if TMA, else pointers. With SWAP the accumulator is transposed, so
    that rows of the weight fill the tensor cores' rows. GATED, always with SWAP, pairs BN / 2 rows of the
    gate with those of the up projection, and stores half as many columns. With GROUP_M, `grouped_tile`
    assigns the tiles.
    """
    if GROUP_M:
        first_m, first_n = grouped_tile(tl.program_id(0), num_rows, size, BM, BN, GROUP_M)
        split = 0
    else:
        first_n, split, first_m = tl.program_id(0) * BN, tl.program_id(1), tl.program_id(2) * BM
    if SPLIT:  # the grid has the number of splits, the last of which may be shorter
        longest = tl.cdiv(tl.cdiv(depth, BK), tl.num_programs(1)) * BK
        first_k = split * longest
        length = tl.minimum(longest, depth - first_k)
    else:
        first_k, length = 0, depth
    r, m, n = tl.arange(0, BN), first_m + tl.arange(0, BM), first_n + tl.arange(0, BN)
    if not TMA:
        if GATED:  # half of the rows are of the gate, half of the up projection
            n = first_n // 2 + r % (BN // 2) + (r // (BN // 2)) * size
        k = first_k + tl.arange(0, BK)
        weights = weight + n[:, None].to(tl.int64) * depth + k[None, :]
        tokens = x + m[:, None].to(tl.int64) * depth + k[None, :]
    pdl_wait(PDL)
    acc = tl.zeros((BN, BM) if SWAP else (BM, BN), tl.float32)
    for k in tl.range(0, length, BK, num_stages=STAGES):
        if TMA:  # loads beyond the edges give zeros
            w = weight.load([first_n, first_k + k])
            t = x.load([first_m, first_k + k])
        else:
            w = tl.load(weights + k)
            t = tl.load(tokens + k, mask=m[:, None] < num_rows, other=0.0)
        acc = tl.dot(w, t.T, acc) if SWAP else tl.dot(t, w.T, acc)
    pdl_launch_dependents(PDL)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, BN // 2, BM)), (1, 2, 0)))
        acc = silu_mul_tile(gate, up)
        n = first_n // 2 + tl.arange(0, BN // 2)
    elif bias is not None:
        if split == 0:
            b = tl.load(bias + n, mask=n < size, other=0.0).to(tl.float32)
            acc += b[:, None] if SWAP else b[None, :]
    m, n = (m[None, :], n[:, None]) if SWAP else (m[:, None], n[None, :])
    inside = m < num_rows
    if GROUP_M:  # otherwise the size is a multiple of BN
        inside = inside & (n < size)
    at = out + (split * num_rows + m).to(tl.int64) * size + n
    tl.store(at, acc.to(out.dtype.element_ty), mask=inside)


def run(
    plan: GemmPlan,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    gated: bool = False,
) -> Tensor:
    """Run the GEMM with `plan`; returns split-K partials if the plan splits K.

    Args:
        plan: the tile. Its sizes have to divide those of the weight, except with a `group_m`.
        x: `[M, K]`.
        weight: `[N, K]`.
        bias: `[N]`.
        dtype: of the result, unless these are split-K partials.
        gated: the weight is `[2 * I, K]`, gate rows first; the result is `silu(gate) * up`, `[M, I]`. Threads
            load the tiles, because half of a tile's rows are of the gate. Then `bias` is None, and the
            plan has `swap` and does not split K.

    Returns:
        `[M, N]`, or `[M, I]` if gated, or split-K partials, float32 `[splits, M, N]`.
    """
    (num_rows, depth), num_columns = x.shape, weight.shape[0]
    size = num_columns // 2 if gated else num_columns
    shape = (plan.splits, num_rows, size) if plan.splits > 1 else (num_rows, size)
    out = torch.empty(shape, dtype=torch.float32 if plan.splits > 1 else dtype, device=x.device)
    tma = plan.tma and not gated
    columns, blocks = ceil_div(num_columns, plan.block_n), ceil_div(num_rows, plan.block_m)
    rows = None if plan.group_m else num_rows  # batch-invariant GEMMs never start their successors early
    _gemm[(columns * blocks,) if plan.group_m else (columns, plan.splits, blocks)](
        x=TensorDescriptor.from_tensor(x, [plan.block_m, plan.block_k]) if tma else x,
        weight=TensorDescriptor.from_tensor(weight, [plan.block_n, plan.block_k]) if tma else weight,
        bias=bias,
        out=out,
        num_rows=num_rows,
        size=size,
        depth=depth,
        BM=plan.block_m,
        BN=plan.block_n,
        BK=plan.block_k,
        SPLIT=plan.splits > 1,
        STAGES=plan.stages,
        TMA=tma,
        SWAP=plan.swap,
        GATED=gated,
        GROUP_M=plan.group_m,
        **launch_options(plan.warps, rows),
    )
    return out


def plan_key(size: int, depth: int) -> str:
    """Returns the key of a weight `[size, depth]` in tables of plans."""
    return f"{size}x{depth}"


def has_stored_plan(size: int, depth: int) -> bool:
    """Whether the stored table has plans for a weight `[size, depth]` on this device."""
    return plan_key(size, depth) in stored_plans(TABLE, device_facts())


def tiles_that_won() -> set[GemmPlan]:
    """Returns the tiles of all stored plans of this device's compute capability."""
    return {
        tile(GemmPlan(**plan))
        for by_rows in stored_plans(TABLE, device_facts(), any_size=True).values()
        for by_kind in by_rows.values()
        for plan in by_kind.values()
        if plan
    }


@cache
def choose(num_rows: int, depth: int, size: int, dtype: torch.dtype, kind: Kind) -> GemmPlan | None:
    """Returns the plan for a GEMM `[num_rows, depth]` by `[size, depth]`, or None to use cuBLAS.

    It is the stored one, or else the one that was found at the start. A plan serves GEMMs up to a number of
    rows. The stored table has one for results that may be split-K partials, and one for whole results, which
    also serves the gate-up SiLU GEMM.
    """
    if num_rows > MAX_ROWS or dtype != torch.bfloat16:
        return None
    stored: Kind = "split" if kind == "split" else "whole"
    sources = ((stored_plans(TABLE, device_facts()), stored), (found_plans(), kind))
    plan = lookup(sources, plan_key(size, depth), num_rows)
    return GemmPlan(**plan) if plan else None


def row_steps() -> set[int]:
    """Returns the numbers of rows up to which a plan serves that is stored, or was found at the start."""
    tables = stored_plans(TABLE, device_facts()), found_plans()
    return {int(max_rows) for table in tables for plans in table.values() for max_rows in plans}


def _batch_invariant(
    block_m: int, block_n: int, block_k: int, stages: int, warps: int, swap: bool = False
) -> GemmPlan:
    """Returns a plan that does not split K, loads by TMA, and works for a weight of any number of rows."""
    return GemmPlan(
        True, block_m, block_n, block_k, splits=1, stages=stages, warps=warps, swap=swap, group_m=8
    )


# The plans of batch-invariant GEMMs of many rows, from the largest tile to the smallest: time of a program on
# a full device, relative to the largest tile's. (Arguments: block_m, block_n, block_k, stages, warps.)
LARGE_M_PLANS = {
    _batch_invariant(128, 256, 64, 4, 8): 1.0,
    _batch_invariant(128, 128, 64, 5, 8): 0.57,
    _batch_invariant(64, 128, 128, 4, 4): 0.37,
    _batch_invariant(64, 64, 128, 5, 4): 0.28,
}
# Those of few rows: for one program per SM, and for several programs per SM.
SMALL_M_PLANS = tuple(_batch_invariant(rows, 64, 128, 6, 4, swap=True) for rows in (16, 32, 64))
SMALL_M_LARGE_N_PLANS = (
    *(_batch_invariant(rows, 64, 128, 4, 4, swap=True) for rows in (16, 32)),
    _batch_invariant(64, 128, 128, 4, 4),
)
_SMALL_M = 64  # rows up to which the time of a batch-invariant GEMM is that of reading the weight


@dataclass(frozen=True, slots=True)
class TritonBatchInvariantGemm:
    """A weight, callable as a batch-invariant GEMM; see `segue.kernels.batch_invariant.Gemm`."""

    weight: Tensor  # [N, K]
    dtype: torch.dtype  # of the results
    num_bytes: int = 0

    def __post_init__(self) -> None:
        """Check the weight.

        Raises:
            ConfigError: the weight is float32, or TMA cannot load rows of its length.
        """
        weight = self.weight
        if weight.dtype == torch.float32 or weight.shape[1] % 8:
            raise ConfigError(
                f"deterministic=True: a weight {list(weight.shape)} is in {weight.dtype}; on CUDA it has to "
                f"be in bfloat16 or float16, and the length of its rows a multiple of 8; use another --dtype "
                f"or leave --deterministic out",
                param="deterministic",
            )

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns `x @ weight.T + bias`, `[M, K] -> [M, N]`."""
        plan = choose_batch_invariant(len(x), self.weight.shape[0], device_facts())
        return run(plan, x, self.weight, bias, self.dtype)


@cache
def choose_batch_invariant(num_rows: int, size: int, device: DeviceFacts) -> GemmPlan:
    """Returns the fastest plan for a batch-invariant GEMM, according to measurements on an H200.

    The GEMM is `[num_rows, K]` by a weight of `size` rows. Few rows take the smallest tile that holds them;
    for many, the time of each plan is that of a program times the waves of programs. A device with less
    shared memory than an H200 has fewer stages, which do not change a bit.
    """

    def fitting(plan: GemmPlan) -> GemmPlan:
        """Returns the plan with as many stages as the device has room for."""
        fitted = fit_stages(plan, device.shared_bytes)
        assert fitted is not None, "two stages of every plan here fit 96 KiB"
        return fitted

    if num_rows <= _SMALL_M:
        # With more rows of the weight than this, blocks of 64 of them give several programs per SM.
        plans = SMALL_M_LARGE_N_PLANS if size > 64 * device.num_sms else SMALL_M_PLANS
        return fitting(next(plan for plan in plans if num_rows <= plan.block_m))

    def cost(plan: GemmPlan) -> float:
        """Returns the relative time of the GEMM with `plan`."""
        programs = ceil_div(num_rows, plan.block_m) * ceil_div(size, plan.block_n)
        waves: int = ceil_div(programs, device.num_sms)
        return LARGE_M_PLANS[plan] * waves

    return fitting(min(LARGE_M_PLANS, key=cost))


def batch_invariant_rows(size: int, max_rows: int, device: DeviceFacts) -> set[int]:
    """Returns the fewest rows with which each plan for a weight of `size` rows is chosen.

    Up to `max_rows` rows there are no further plans: all numbers of rows of a block of 64 have the same one.
    """
    found: dict[GemmPlan, int] = {}
    for rows in (16, 32, *range(_SMALL_M, max_rows + _SMALL_M, _SMALL_M)):
        rows = min(rows, max_rows)
        found.setdefault(choose_batch_invariant(rows, size, device), rows)
    return set(found.values())
