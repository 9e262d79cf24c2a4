"""Plans of GEMMs of one token: a pure module.

A plan has enough loads on their way, and registers for them. Which plan is the fastest was measured on an
H200, for the weights of Qwen3-0.6B, 4B and 8B.
"""

from __future__ import annotations

from dataclasses import dataclass

_MAX_DEPTH = 32768  # columns of a weight that the registers of a program hold
_REGISTERS = 65536  # of a multiprocessor
_SHORT = 65536  # numbers per multiprocessor up to which a weight counts as short


@dataclass(frozen=True, slots=True)
class GemvPlan:
    """The tile and launch options of one GEMM of one token."""

    block_n: int  # columns of the result per step of a program
    per_sm: int  # programs per multiprocessor at most; all programs share the tiles
    warps: int

    @property
    def registers(self) -> int:
        """The registers that each thread may use, so that all programs run at the same time."""
        return min(255, _REGISTERS // (32 * self.warps * self.per_sm) // 8 * 8)


def fits_gemv(depth: int) -> bool:
    """Returns whether there are plans for weights of `depth` columns."""
    return depth <= _MAX_DEPTH and depth % 16 == 0


def choose_gemv(size: int, depth: int, *, in_fp8: bool, gated: bool, num_sms: int) -> GemvPlan:
    """Returns the plan for a weight of `size` rows and `depth` columns."""
    if depth > 16384 or (in_fp8 and gated and depth > 8192):
        numbers, per_sm, warps = 65536 if in_fp8 else 32768, 1, 16
    elif in_fp8 and gated:
        numbers, per_sm, warps = (32768, 2, 8) if depth > 4096 else (16384, 4, 4)
    elif in_fp8 and 8192 < depth <= 12288:
        numbers, per_sm, warps = 65536, 2, 8
    elif in_fp8:
        numbers, per_sm, warps = 32768, 2 if depth > 4096 else 3, 8
    elif depth > 8192:
        numbers, per_sm, warps = 32768, 1, 16
    elif size * depth <= _SHORT * num_sms:
        # A tile has about 8192 numbers: more would leave the next kernel's programs too little room.
        numbers, per_sm, warps = (8192, 3, 8) if gated and depth <= 4096 else (16383, 2, 8)
    else:  # as many programs as have 32768 numbers together
        numbers, per_sm, warps = 12288 if gated else 16384, None, 4
    per_column = depth * (2 if gated else 1)  # numbers of the weight for one column of the result
    rows = 1 << max(0, (numbers // per_column).bit_length() - 1)
    return GemvPlan(rows, per_sm or 32768 // (rows * per_column), warps)
