"""Plans of GEMMs of one token: a pure module.

A plan has enough loads on their way, and registers for them; which is best was measured on an H200, for the
weights of Qwen3-0.6B, 4B and 8B.
"""

from __future__ import annotations

from dataclasses import dataclass

_MAX_DEPTH = 32768  # columns of a weight that the registers of a program hold


@dataclass(frozen=True, slots=True)
class GemvPlan:
    """The tile and launch options of one GEMM of one token."""

    block_n: int  # columns of the result per step of a program
    programs: int  # at most, which share the tiles
    warps: int


def fits_gemv(depth: int) -> bool:
    """Returns whether there are plans for weights of `depth` columns."""
    return depth <= _MAX_DEPTH and depth % 16 == 0


def choose_gemv(depth: int, *, in_fp8: bool, gated: bool, num_sms: int) -> GemvPlan:
    """Returns the plan for a weight of `depth` columns."""
    if depth > 16384:
        numbers, per_sm, warps = 65536 if in_fp8 else 32768, 1, 16
    elif in_fp8 and depth > 8192 and not gated:
        numbers, per_sm, warps = 65536, 2, 8
    elif in_fp8:
        numbers, per_sm, warps = (16384, 4, 4) if gated else (32768, 3, 8)
    elif depth > 8192:
        numbers, per_sm, warps = 16384, 2, 8
    elif (
        depth <= 2048 and not gated
    ):  # at least 8192 numbers, which leaves room for the next kernel's programs
        numbers, per_sm, warps = 16383, 2, 4
    else:
        numbers, per_sm, warps = (12288 if gated else 16384), 0, 4
    rows = 1 << max(0, (numbers // (2 if gated else 1) // depth).bit_length() - 1)
    tile = rows * depth * (2 if gated else 1)
    return GemvPlan(rows, (per_sm or 32768 // tile) * num_sms, warps)
