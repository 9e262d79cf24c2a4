"""Gumbel noise keyed by seed, position and counter, identical to that of `segue.sampling.gumbel_max`."""

import triton
import triton.language as tl


@triton.jit
def _mix(x):
    """Returns SplitMix64's hash of a uint64."""
    x = (x ^ (x >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def gumbel(seed, position, counters):
    """Returns the same numbers, float64, as `segue.sampling.gumbel_max.gumbel`, one per counter."""
    increment = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    key = _mix(_mix(seed.to(tl.uint64, bitcast=True)) + position.to(tl.uint64) * increment)
    bits = _mix(key + (counters.to(tl.uint64) + 1) * increment) >> 12
    uniform = (bits.to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))
