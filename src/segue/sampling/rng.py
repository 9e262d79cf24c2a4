"""Stateless random numbers: each one is a hash of (seed, position, counter)."""

from __future__ import annotations

import torch
from torch import Tensor


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


# SplitMix64 (Steele, Lea, Flood 2014): a Weyl sequence with this increment, hashed by this finaliser.
_INCREMENT = _signed(0x9E3779B97F4A7C15)
_MULTIPLIERS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))
_SHIFTS = (30, 27)
_LAST_SHIFT = 31


def hash64(seeds: Tensor, positions: Tensor, counters: Tensor) -> Tensor:
    """Return 64 random bits, int64 `[B, N]`, for each key.

    A key is a seed and a position (int64 `[B, 1]`), and a counter (int64 `[N]` or `[B, N]`).
    """
    keys = _mix(_mix(seeds) + positions * _INCREMENT)
    return _mix(keys + (counters + 1) * _INCREMENT)


def gumbel(seeds: Tensor, positions: Tensor, counters: Tensor) -> Tensor:
    """Return standard Gumbel noise, float64 `[B, N]`, with the same key as `hash64`.

    The argmax of log-weights plus this noise is a draw from the distribution with these weights.
    """
    bits = _shift_right(hash64(seeds, positions, counters), 12)
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-52  # never 0 or 1
    return -torch.log(-torch.log(uniform))


def _mix(x: Tensor) -> Tensor:
    for shift, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=True):
        x = (x ^ _shift_right(x, shift)) * multiplier
    return x ^ _shift_right(x, _LAST_SHIFT)


def _shift_right(x: Tensor, count: int) -> Tensor:
    return (x >> count) & ((1 << (64 - count)) - 1)  # the mask clears the copies of the sign bit
