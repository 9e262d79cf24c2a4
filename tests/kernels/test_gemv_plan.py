"""Plans of GEMMs of one token."""

import pytest

from segue.kernels.gemv_plan import choose_gemv, fits_gemv

DEPTHS = [16, 96, 576, 1024, 1536, 2560, 4096, 5120, 8192, 9728, 12288, 14336, 16384, 17408, 28672, 32768]


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("size", [512, 151936])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_plan_fits_the_registers_and_keeps_loads_on_their_way(depth, size, in_fp8, gated) -> None:
    assert fits_gemv(depth)
    plan = choose_gemv(size, depth, in_fp8=in_fp8, gated=gated, num_sms=132)
    threads, rows, per_sm = 32 * plan.warps, plan.block_n * (2 if gated else 1), plan.per_sm
    # The token in float32 (FP8: in float16, as pairs), and a tile.
    registers = depth / threads / (2 if in_fp8 else 1) + rows * depth / threads / (4 if in_fp8 else 2)
    assert registers <= plan.registers
    assert threads * per_sm <= 1024 and plan.registers * threads * per_sm <= 65536
    # An H200 moves 32 bytes per nanosecond and SM, and a load takes about a microsecond.
    assert rows * depth * per_sm * (1 if in_fp8 else 2) >= 32 << 10
    assert plan.block_n & (plan.block_n - 1) == 0


def test_depths_without_a_plan() -> None:
    assert not fits_gemv(32768 + 16) and not fits_gemv(1000)
