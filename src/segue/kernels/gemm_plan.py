"""Plans of GEMMs by a weight, which of them a device can run, and what each would cost: a pure module.

A shape that nobody measured gets its plan in two steps. `candidates` predicts the time of every plan that is
worth trying and returns the best few; the start of an engine then times those (`kernels.triton.plan_timing`).
So the prediction only has to rank: the best plan has to be among the first few.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, NamedTuple

from segue.sizes import next_power_of_2

Kind = Literal["split", "whole", "gated"]
"""What a GEMM returns: split-K partials if that is faster, whole results, or `silu(gate) * up`, whole."""

ELEMENT = 2  # bytes of a bfloat16
ROWS = (8, 16, 32, 64)  # a plan that is found at a start serves up to so many; more gain nothing
MAX_GATED_ROWS = 64  # rows up to which one kernel may do the gate-up GEMM and its activation
NUM_CANDIDATES = 8
FEW_ROWS = 8  # rows up to which kernels start their successors early, see `kernels.triton.launch`
WORTH = 0.98  # a plan is used if it takes less than this share of the library's time
_SPLITS = (*range(1, 17), 20)
_REGISTERS = 65536  # per SM
_THREADS = 2048  # per SM; some devices have 1536, and no plan here has so many
_MAX_PROGRAMS = 32  # per SM
_RESERVED = 1024  # bytes of shared memory that the driver takes per program
# bfloat16 operations per clock and SM, by major compute capability; devices of others count as the last one.
_OPERATIONS = {8: 2048, 9: 4096, 10: 8192}
_CLOCK = 1.7e9


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """The tile, split and launch options of one GEMM."""

    tma: bool  # whether TMA loads the tiles, not threads
    block_m: int  # tokens
    block_n: int  # rows of the weight
    block_k: int
    splits: int  # of K, the last of which may be shorter; more than one gives split-K partials
    stages: int
    warps: int
    swap: bool = True  # whether rows of the weight, not tokens, fill the tensor cores' 64 rows
    group_m: int = 0  # blocks of tokens whose tiles run together and share the L2 cache; 0: all. Needs TMA

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory that a stage of the pipeline takes."""
        return (self.block_m + self.block_n) * self.block_k * ELEMENT

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that a program takes."""
        return self.stages * self.stage_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What plans depend on."""

    name: str  # only a note: no plan is chosen by it
    capability: tuple[int, int]  # CUDA compute capability
    num_sms: int
    shared_bytes: int  # most shared memory of a program
    memory_bytes: int  # of the whole device
    bandwidth: float  # of its memory, bytes per second

    @property
    def has_tma(self) -> bool:
        """Whether the device has TMA and programmatic dependent launch."""
        return self.capability >= (9, 0)

    @property
    def max_split_programs(self) -> int:
        """The most programs that split the keys of a small decode batch: about two per SM, a power of two."""
        return 1 << max(1, round_log2(2 * self.num_sms))


def round_log2(value: int) -> int:
    """Returns the exponent of the power of two that is nearest to `value`, by ratio."""
    floor = value.bit_length() - 1
    return floor + (value * value >= 1 << (2 * floor + 1))


@dataclass(frozen=True, slots=True)
class GemmShape:
    """A GEMM `[rows, depth]` by a weight `[size, depth]`."""

    rows: int
    size: int  # N
    depth: int  # K
    kind: Kind


def split_steps(depth: int, block_k: int, splits: int) -> int:
    """Returns the steps along K of each split but the last, which has those that are left; 0: it has none."""
    steps = -(-depth // block_k)
    longest = -(-steps // splits)
    return longest if (splits - 1) * longest < steps else 0


def row_buckets(first: int, last: int) -> list[int]:
    """Returns those of `ROWS` whose plans serve any number of rows from `first` to `last`."""
    return [rows for below, rows in zip((0, *ROWS), ROWS, strict=False) if below < last and first <= rows]


def fewest_rows(rows: int) -> int:
    """Returns the fewest rows that the plan serves that is found for `rows` of `ROWS`.

    One row has a kernel of its own (`gemv_plan.py`), but where that cannot multiply, which is rare.
    """
    return 1 + max(below for below in (1, *ROWS) if below < rows)


def valid_plans(shape: GemmShape, device: DeviceFacts) -> Iterator[GemmPlan]:
    """Yield the plans that the device can run and that are worth trying."""
    rows, size, depth = shape.rows, shape.size, shape.depth
    tiles = {64, 128, 256} if rows > 128 else {64, 128}
    if rows <= 64:
        tiles = {max(16, next_power_of_2(rows))}
    # Tiles of 32 rows of the weight are for programs that cannot be split along K.
    columns = (32, 64, 128) if rows <= 16 and shape.kind == "gated" else (64, 128)
    splits = _SPLITS if shape.kind == "split" else (1,)
    loads = (False, True) if device.has_tma and shape.kind != "gated" else (False,)
    for block_m, block_n, block_k, count, stages, warps, tma in product(
        sorted(tiles), columns, (64, 128), splits, (3, 4, 6), (4, 8), loads
    ):
        plan = GemmPlan(tma, block_m, block_n, block_k, count, stages, warps)
        # Tiles divide N and K evenly, and every split but the last has at least two steps along K.
        if size % block_n or depth % block_k or split_steps(depth, block_k, count) < 2:
            continue
        per_sm = size // block_n * count * -(-rows // block_m) / device.num_sms
        # Fewer programs leave most of the device idle; more would be split further than necessary.
        if (shape.kind == "split" and per_sm < 0.36) or (count > 1 and per_sm > 5.3):
            continue
        # The pipeline's stages fit the shared memory, and are large enough to keep loads in flight.
        if not 48 << 10 <= plan.shared_bytes <= device.shared_bytes:
            continue
        # At most 128 registers per thread for the sums; small tiles by TMA are tried with 4 stages alone.
        if block_m * block_n // (32 * warps) > 128 or (tma and block_m < 64 and stages != 4):
            continue
        yield plan


class Terms(NamedTuple):
    """What a plan's time is made of: the seconds or counts that the constants below weigh."""

    memory: float  # seconds to read the weight at the bandwidth of the memory
    busiest: float  # seconds to read what the busiest SM reads, at an SM's share of the bandwidth
    loads: float  # stages that the busiest SM loads one after the other, when it keeps its pipelines full
    operations: float  # seconds of the tensor cores of the busiest SM, at their peak
    steps: float  # steps along K of the busiest SM, those of programs that run at once counted once
    rounds: float  # programs of the busiest SM that run one after the other
    programs: float  # programs of the busiest SM
    partials: float  # seconds to write the split-K partials and read them, at the bandwidth of the memory
    tma: float  # 1 with TMA
    warps: float  # warps per program beyond 4, relative to 4


class Constants(NamedTuple):
    """What `bench.fit_gemm` fits to the measured plans."""

    share: float  # an SM's greatest bandwidth, relative to its share of the memory's
    latency: float  # seconds from a load to its data
    operations: float  # seconds of the tensor cores, relative to their peak
    round: float  # seconds to fill a pipeline
    program: float  # seconds that a program takes to start and to store its results
    partials: float  # seconds for partials, relative to the bandwidth of the memory
    warps: float  # seconds that twice the warps add to a step
    tma: float  # seconds that TMA adds to a step


FITTED = Constants(
    share=1.35,
    latency=1.14e-06,
    operations=2.21,
    round=7.09e-07,
    program=2.33e-07,
    partials=5.81,
    warps=1.6e-07,
    tma=-9.13e-09,
)
_LAUNCH = 2e-6  # seconds of a launch: the same for all plans
_NORM = 4  # overlapping costs add up by this norm: close to the largest of them


def programs_at_once(plan: GemmPlan, device: DeviceFacts) -> int:
    """Returns how many programs of a plan an SM runs at once; at least one."""
    per_sm = device.shared_bytes + _RESERVED  # an SM has this much for all of its programs
    registers = min(255, plan.block_m * plan.block_n // (32 * plan.warps) + 64)
    return max(
        1,
        min(
            per_sm // (plan.shared_bytes + _RESERVED),
            _REGISTERS // (32 * plan.warps * registers),
            _THREADS // (32 * plan.warps),
            _MAX_PROGRAMS,
        ),
    )


def terms(plan: GemmPlan, shape: GemmShape, device: DeviceFacts) -> Terms:
    """Returns what the time of a GEMM is made of."""
    columns, blocks = -(-shape.size // plan.block_n), -(-shape.rows // plan.block_m)
    programs = columns * plan.splits * blocks
    steps = split_steps(shape.depth, plan.block_k, plan.splits)
    own = -(-programs // device.num_sms)  # programs of the busiest SM
    at_once = min(own, programs_at_once(plan, device))
    per_clock = _OPERATIONS.get(device.capability[0], _OPERATIONS[10])
    block = 2 * plan.block_m * plan.block_n * plan.block_k
    return Terms(
        memory=shape.size * shape.depth * ELEMENT / device.bandwidth,
        busiest=own * steps * plan.block_n * plan.block_k * ELEMENT * device.num_sms / device.bandwidth,
        loads=own * steps / (at_once * (plan.stages - 1)),
        operations=own * steps * block / (per_clock * _CLOCK),
        steps=own * steps / at_once,
        rounds=own / at_once,
        programs=own,
        partials=(plan.splits > 1) * (plan.splits * 4 - 2) * shape.rows * shape.size / device.bandwidth,
        tma=plan.tma,
        warps=plan.warps / 4 - 1,
    )


def seconds(found: Terms, constants: Constants) -> float:
    """Returns the predicted seconds. It is arithmetic alone, so that `bench.fit_gemm` can pass arrays."""
    streamed: float = (
        found.memory**_NORM
        + (found.busiest / constants.share) ** _NORM
        + (found.loads * constants.latency) ** _NORM
        + (found.operations * constants.operations) ** _NORM
    ) ** (1 / _NORM)
    return (
        _LAUNCH
        + streamed
        + found.steps * (found.tma * constants.tma + found.warps * constants.warps)
        + found.rounds * constants.round
        + found.programs * constants.program
        + found.partials * constants.partials
    )


def predict(plan: GemmPlan, shape: GemmShape, device: DeviceFacts, constants: Constants = FITTED) -> float:
    """Returns the predicted seconds of a GEMM, with the reading of its split-K partials."""
    return seconds(terms(plan, shape, device), constants)


def tile(plan: GemmPlan) -> GemmPlan:
    """Returns the plan without its number of splits, which belongs to a shape."""
    return replace(plan, splits=1)


def candidates(
    shapes: Iterable[GemmShape],
    device: DeviceFacts,
    won: Container[GemmPlan] = (),
    constants: Constants = FITTED,
) -> dict[GemmShape, list[GemmPlan]]:
    """Returns for each shape the plans to try, at most `NUM_CANDIDATES`, the most promising first.

    Plans are ranked by their predicted time. Tiles that `won` for other shapes have an advantage, and so have
    kernels that a shape before needs anyway, because each kernel takes time to compile.
    """
    used: set[object] = set()
    found = {}
    for shape in shapes:

        def kernel(plan: GemmPlan, shape: GemmShape = shape) -> object:
            """Returns what tells the kernel of a plan from others; few rows have other launch options."""
            return tile(plan), plan.splits > 1, shape.kind, shape.rows <= FEW_ROWS

        def rank(plan: GemmPlan, shape: GemmShape = shape) -> float:
            time = predict(plan, shape, device, constants)
            return time * (1 if tile(plan) in won else 1.1) * (1 if kernel(plan) in used else 1.05)

        found[shape] = sorted(valid_plans(shape, device), key=rank)[:NUM_CANDIDATES]
        used.update(map(kernel, found[shape]))
    return found


def choose_fastest(times: Mapping[GemmPlan, float], library: float) -> GemmPlan | None:
    """Returns the fastest of some timed plans, or None if the library is as fast, or almost."""
    best = min(times, key=times.__getitem__, default=None)
    return best if best is not None and times[best] < WORTH * library else None


def fit_stages(plan: GemmPlan, shared_bytes: int) -> GemmPlan | None:
    """Returns the plan with as many stages as fit the shared memory, at most its own; None: not even two."""
    stages = min(plan.stages, shared_bytes // plan.stage_bytes)
    return replace(plan, stages=stages) if stages >= 2 else None
