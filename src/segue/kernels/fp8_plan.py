"""Plans of GEMMs by a weight in FP8, and which of them to try: a pure module.

Candidates are ranked by the cost model of `kernels.gemm_plan`: a weight in FP8 has the bytes of one in
bfloat16 with half of the columns. What comes on top is the instructions by which numbers are converted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product, zip_longest

from segue.kernels.gemm_plan import (
    ELEMENT,
    FEW_ROWS,
    DeviceFacts,
    GemmPlan,
    GemmShape,
    Kind,
    predict,
    programs_at_once,
    split_steps,
)
from segue.sizes import next_power_of_2

MAX_FEW_ROWS = 64  # rows up to which a GEMM takes as long as reading the weight
SPLIT_BLOCK = 128  # columns of a token that share a factor, if its numbers are sums of two in FP8
_PER_ARITHMETIC = 5  # candidates that are tried for each of the two ways to multiply
_SPLIT = 2e-6  # predicted seconds of the kernel that splits the numbers of tokens into two in FP8
_NORM = 4  # reading and converting overlap: their times add up by this norm
_ISSUED = 4 * 1.7e9  # instructions of warps that an SM issues per second, if enough warps are ready
_BUSY_WARPS = 8  # warps of an SM that issue half as many
_BLOCK = 64  # weights per scale from which the scale is applied to the sum of the products
_SHARED = 1 << 10  # bytes of shared memory for what is not a tile, such as barriers
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)


@dataclass(frozen=True, slots=True)
class FP8Plan:
    """The tile, split and launch options of one GEMM; see `segue.kernels.gemm_plan.GemmPlan`."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    stages: int
    warps: int
    fp8_tokens: bool = False  # whether the tensor cores multiply in FP8, each token as the sum of two numbers

    def shared_bytes(self, block: int, capability: tuple[int, int]) -> int:
        """Returns the bytes of shared memory that a program takes at most; for `block` see `kernels.fp8`.

        The stage that is multiplied is in registers, unless the tensor cores read shared memory: the weight
        in FP8, and tokens as two numbers each, or with 64 tokens on Hopper the tokens, and the weight once it
        is turned to their type.
        """
        weight, tokens = self.block_n * self.block_k, ELEMENT * self.block_m * self.block_k
        scales = 4 * self.block_n * -(-self.block_k // block) if block else 0
        multiplied = 0
        if self.fp8_tokens:
            multiplied = weight + tokens
            scales += 8 * self.block_m  # two factors of a token, in float32
        elif capability >= (9, 0) and self.block_m >= 64:
            multiplied = ELEMENT * weight + tokens
        return (self.stages - 1) * (weight + tokens + scales) + multiplied + _SHARED


@dataclass(frozen=True, slots=True)
class FP8Shape:
    """A GEMM `[rows, depth]` by a weight `[size, depth]` in FP8; for `block` see `kernels.fp8`."""

    rows: int
    size: int
    depth: int
    block: int
    kind: Kind

    @property
    def key(self) -> str:
        """The key of the weight in tables of plans."""
        return f"{self.size}x{self.depth} fp8" + (f"/{self.block}" if self.block else "")


def default_plan(shape: FP8Shape, num_sms: int) -> FP8Plan:
    """Returns a plan that runs on any device that has FP8; K is split to keep all SMs busy."""
    is_small, splits = shape.rows <= MAX_FEW_ROWS, 1
    block_m = _block_m(shape.rows)
    block_n = 64 if is_small else many_rows_tile(shape.rows, shape.size, num_sms)
    programs = -(-shape.rows // block_m) * -(-shape.size // block_n)
    while shape.kind == "split" and programs * splits < 2 * num_sms and shape.depth >= 2 * splits * 512:
        splits *= 2
    if is_small:
        return FP8Plan(block_m, block_n, block_k=128, splits=splits, stages=4, warps=4)
    return FP8Plan(block_m, block_n, block_k=64, splits=splits, stages=3, warps=8)


def many_rows_tile(rows: int, size: int, num_sms: int) -> int:
    """Returns how many rows of the weight a tile of 128 tokens has."""
    return 128 if -(-rows // 128) * -(-size // 128) >= num_sms else 64


def row_steps(shapes: Iterable[FP8Shape], max_rows: int, num_sms: int) -> set[int]:
    """Returns the numbers of rows up to which GEMMs of these shapes have the same kernels by default.

    Those of plans that the start found are not among them. The rows of the shapes do not matter.
    """

    def kernel(shape: FP8Shape, rows: int) -> tuple[int, int]:
        plan = default_plan(replace(shape, rows=rows), num_sms)
        return plan.block_n, plan.splits  # the reader of the result has a kernel for each number of splits

    found = {16, 32, MAX_FEW_ROWS}
    for shape in {replace(shape, rows=1) for shape in shapes}:
        ends = range(128, max_rows + 128, 128)
        found |= {end for end in ends if kernel(shape, end) != kernel(shape, end + 128)}
    return found


def candidates(shapes: Iterable[FP8Shape], device: DeviceFacts) -> dict[FP8Shape, list[FP8Plan]]:
    """Returns for each shape the plans to try, the most promising ones of both ways to multiply in turns.

    As each kernel takes time to compile, those that a shape before needs anyway have an advantage.
    """
    used: set[object] = set()
    found = {}
    for shape in shapes:

        def kernel(plan: FP8Plan, shape: FP8Shape = shape) -> object:
            """Returns what tells the kernel of a plan from others; few rows have other launch options."""
            gated, few = shape.kind == "gated", shape.rows <= FEW_ROWS
            return replace(plan, splits=1), plan.splits > 1, shape.block, gated, few

        def rank(plan: FP8Plan, shape: FP8Shape = shape) -> float:
            return _predict(plan, shape, device) * (1 if kernel(plan) in used else 1.05)

        ranked = sorted(valid_plans(shape, device), key=rank)
        ways = [[plan for plan in ranked if plan.fp8_tokens == way] for way in (False, True)]
        turns = zip_longest(*(way[:_PER_ARITHMETIC] for way in ways))
        found[shape] = [plan for turn in turns for plan in turn if plan is not None]
        used.update(map(kernel, found[shape]))
    return found


def valid_plans(shape: FP8Shape, device: DeviceFacts) -> Iterator[FP8Plan]:
    """Yield the plans for few rows that the device can run and that are worth trying."""
    smallest = _block_m(shape.rows)
    tiles = {smallest, 64} if smallest > 16 else {16}  # 64 tokens fill the tensor cores of Hopper
    splits = _SPLITS if shape.kind == "split" else (1,)
    ways = (False, True) if device.capability >= (9, 0) else (False,)
    for block_m, block_n, block_k, count, stages, warps, fp8_tokens in product(
        sorted(tiles), (64, 128), (128, 256), splits, (3, 4, 6), (4, 8), ways
    ):
        plan = FP8Plan(block_m, block_n, block_k, count, stages, warps, fp8_tokens)
        if shape.size % block_n or shape.depth % block_k or split_steps(shape.depth, block_k, count) < 2:
            continue
        is_fine = 0 < shape.block < _BLOCK  # such scales are applied to each weight, before it is multiplied
        if (fp8_tokens and is_fine) or (shape.block and not is_fine and shape.block % block_k):
            continue
        per_sm = shape.size // block_n * count / device.num_sms
        if (shape.kind == "split" and per_sm < 0.36) or (count > 1 and per_sm > 5.3):
            continue
        if plan.shared_bytes(shape.block, device.capability) > device.shared_bytes:
            continue
        # Registers hold two tiles in float32, sums and products, of twice as many tokens: 128 per thread.
        if fp8_tokens and (block_k != SPLIT_BLOCK or 4 * block_m * block_n > 128 * 32 * warps):
            continue
        yield plan


def _block_m(rows: int) -> int:
    """Returns the tokens of a tile."""
    return max(16, next_power_of_2(rows)) if rows <= MAX_FEW_ROWS else 128


def _predict(plan: FP8Plan, shape: FP8Shape, device: DeviceFacts) -> float:
    """Returns the predicted seconds.

    They are those of the GEMM in bfloat16 that reads as many bytes, of converting, and of splitting tokens.
    """
    tile = plan.block_m, plan.block_n, plan.block_k // 2
    same_bytes = GemmPlan(False, *tile, plan.splits, plan.stages, plan.warps)
    reading = predict(same_bytes, GemmShape(shape.rows, shape.size, shape.depth // 2, shape.kind), device)
    own = -(-(shape.size // plan.block_n * plan.splits) // device.num_sms)  # programs of the busiest SM
    steps = own * split_steps(shape.depth, plan.block_k, plan.splits)
    warps = plan.warps * min(own, programs_at_once(same_bytes, device))
    issued = _ISSUED * warps / (warps + _BUSY_WARPS)
    converting: float = steps * plan.warps * _instructions(plan) / issued
    return (_SPLIT if plan.fp8_tokens else 0) + float((reading**_NORM + converting**_NORM) ** (1 / _NORM))


def _instructions(plan: FP8Plan) -> float:
    """Returns roughly the instructions of a warp for one step along K, as compiled for 9.0."""
    threads = 32 * plan.warps
    if plan.fp8_tokens:
        return 2 * plan.block_n * 2 * plan.block_m / threads + 110  # products times factors, added up
    weights = plan.block_n * plan.block_k / threads
    fragments = plan.block_m * plan.block_k / 256 if plan.block_m < 64 else 0  # of tokens, in every warp
    return 2.6 * weights + 8 * fragments + 70
