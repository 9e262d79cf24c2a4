"""Plans of the two grouped GEMMs of a mixture of experts, and which of them to try: a pure module.

There is no cost model as for other GEMMs: the time depends on how tokens share experts. A shape that nobody
measured tries the plans of measured shapes whose experts have about as many tokens each, and some that every
device can run; the start of an engine times them (`kernels.triton.plan_timing`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from segue.kernels.gemm_plan import ELEMENT, DeviceFacts

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)  # a plan serves up to so many tokens
_MAX_PLANS = 10
_FEW_TOKENS, _FEW_PAIRS = 4, 32  # so many tokens, or pairs per expert, have small tiles by default
_MANY = 256  # pairs per expert from which all plans fill their tiles


@dataclass(frozen=True, slots=True)
class TileConfig:
    """The tile and launch options of one of the GEMMs."""

    block_n: int  # rows of the weight
    block_k: int
    stages: int
    warps: int
    tma: bool = False  # whether TMA loads the tiles, not threads
    halves: bool = False  # whether a tile that is at most half full runs with half of block_m


@dataclass(frozen=True, slots=True)
class MoEPlan:
    """The configurations of both GEMMs for a number of tokens."""

    block_m: int  # pairs per tile, all of one expert; 1: pairs in the order of tokens, not sorted
    gate_up: TileConfig
    down: TileConfig

    @staticmethod
    def of(stored: Mapping[str, Any]) -> MoEPlan:
        """Returns the plan of a table."""
        return MoEPlan(stored["block_m"], TileConfig(**stored["gate_up"]), TileConfig(**stored["down"]))

    def stored(self) -> dict[str, Any]:
        """Returns the plan as tables have it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class MoEShape:
    """The experts of a layer: E experts, k per token, I rows per expert, hidden size H."""

    num_experts: int
    per_token: int
    size: int
    hidden: int
    fp8_block: int | None = None  # of weights in FP8, see `kernels.fp8`; None: they are in bfloat16

    @property
    def key(self) -> str:
        """The key of the shape in tables of plans."""
        sizes = f"{self.num_experts}x{self.per_token}x{self.size}x{self.hidden}"
        if self.fp8_block is None:
            return sizes
        return f"{sizes} fp8" + (f"/{self.fp8_block}" if self.fp8_block else "")

    @staticmethod
    def of(key: str) -> MoEShape:
        """Returns the shape of a key."""
        sizes, fp8, block = key.partition(" fp8")
        shape = MoEShape(*map(int, sizes.split("x")))
        return replace(shape, fp8_block=int(block[1:] or 0)) if fp8 else shape

    @property
    def element(self) -> int:
        """The bytes of a weight."""
        return ELEMENT if self.fp8_block is None else 1

    def pairs(self, tokens: int) -> float:
        """Returns the mean number of pairs of a token and an expert, per expert."""
        return tokens * self.per_token / self.num_experts


def default_steps(shape: MoEShape) -> set[int]:
    """Returns the numbers of tokens up to which a default plan serves."""
    return {_FEW_TOKENS, _FEW_PAIRS * shape.num_experts // shape.per_token}


def default_plan(shape: MoEShape, tokens: int, *, is_float32: bool) -> MoEPlan:
    """Returns a plan that runs on any device."""
    if tokens <= _FEW_TOKENS:
        return MoEPlan(1, TileConfig(8, 256, 2, 4), TileConfig(8, 256, 2, 4))
    if is_float32 or shape.pairs(tokens) <= _FEW_PAIRS:
        config = TileConfig(32, 32, 2, 4) if is_float32 else TileConfig(64, 64, 3, 4)
        return MoEPlan(16, config, config)
    return MoEPlan(64, TileConfig(64, 64, 3, 4), TileConfig(128, 64, 3, 4))


def candidates(
    shape: MoEShape, tokens: int, device: DeviceFacts, measured: Mapping[str, Mapping[str, Any]]
) -> list[MoEPlan]:
    """Returns the plans to try for a number of tokens.

    `measured` has the stored plans of other shapes on devices of the same compute capability, by key and
    number of tokens.
    """
    pairs = min(shape.pairs(tokens), _MANY)
    near = [
        MoEPlan.of(plan)
        for key, by_tokens in measured.items()
        for count, plan in by_tokens.items()
        if pairs / 3 <= MoEShape.of(key).pairs(int(count)) <= pairs * 3
    ]
    plans = [*near, *_any_device(tokens, pairs, device, in_fp8=shape.fp8_block is not None)]
    return list(dict.fromkeys(plan for plan in plans if is_valid(plan, shape, device)))[:_MAX_PLANS]


def _any_device(tokens: int, pairs: float, device: DeviceFacts, *, in_fp8: bool) -> Iterator[MoEPlan]:
    """Yield plans that are worth trying on a device for which none were measured.

    Tiles in FP8 have half the bytes: with more of them as many bytes are on their way.
    """
    if tokens <= 16:
        if in_fp8:
            yield MoEPlan(1, TileConfig(8, 512, 3, 4), TileConfig(8, 512, 3, 4))
        yield MoEPlan(1, TileConfig(8, 256, 3, 2), TileConfig(4, 512, 3, 2))
        yield MoEPlan(1, TileConfig(8, 256, 2, 4), TileConfig(8, 256, 2, 4))
    for block in (16, 32, 64, 128):
        if not (pairs <= 4 * block and block <= max(16, 4 * pairs)):
            continue
        for tma in (True, False) if device.has_tma else (False,):
            if block < 64:
                yield MoEPlan(block, TileConfig(64, 128, 3, 4, tma), TileConfig(64, 128, 3, 4, tma))
                if in_fp8:
                    yield MoEPlan(block, TileConfig(64, 128, 5, 4, tma), TileConfig(64, 128, 5, 4, tma))
                yield MoEPlan(block, TileConfig(64, 64, 3, 4, tma), TileConfig(64, 64, 3, 4, tma))
            else:
                if in_fp8:
                    yield MoEPlan(block, TileConfig(64, 64, 4, 8, tma), TileConfig(128, 64, 4, 8, tma))
                yield MoEPlan(block, TileConfig(64, 64, 3, 4, tma), TileConfig(128, 64, 3, 4, tma))


def is_valid(plan: MoEPlan, shape: MoEShape, device: DeviceFacts) -> bool:
    """Whether a device can run a plan, its tiles divide the weights, and its sums fit into registers.

    With scales of blocks a product is beside the sums until it is added to them.
    """
    if plan.block_m == 1:
        return True
    gemms: Iterable[tuple[TileConfig, int, int, int]] = (
        (plan.gate_up, 2, shape.size, shape.hidden),
        (plan.down, 1, shape.hidden, shape.size),
    )
    return all(
        rows % config.block_n == 0
        and depth % config.block_k == 0
        and (device.has_tma or not config.tma)
        and config.stages
        * (weights * config.block_n * shape.element + plan.block_m * ELEMENT)
        * config.block_k
        <= device.shared_bytes
        and (not shape.fp8_block or (weights + 1) * config.block_n * plan.block_m <= 4096 * config.warps)
        for config, weights, rows, depth in gemms
    )
