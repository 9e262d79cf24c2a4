"""Plans of GEMMs of one token: a pure module."""

from __future__ import annotations

from dataclasses import dataclass

_WARPS = 4
_PER_SM = 4
_NUMBERS = (
    8192  # of a tile in bfloat16, and half of those of one in FP8, so that enough loads are on their way
)


@dataclass(frozen=True, slots=True)
class GemvPlan:
    """The tile and launch options of one GEMM of one token."""

    block_n: int  # columns of the result per step of a program
    programs: int  # at most, which share the tiles
    warps: int


def choose_gemv(depth: int, *, in_fp8: bool, gated: bool, num_sms: int) -> GemvPlan:
    """Returns the plan for a weight of `depth` columns, as measured on an H200 for eight of them."""
    most = _NUMBERS * (1 + in_fp8) // (1 + gated) // depth
    return GemvPlan(1 << max(0, most.bit_length() - 1), _PER_SM * num_sms, _WARPS)
