"""Plans of GEMMs of one token."""

import pytest

from segue.kernels.gemv_plan import choose_gemv, fits_gemv

DEPTHS = [16, 96, 576, 896, 1024, 1536, 2048, 2560, 3072, 4096, 4864, 5120, 6144, 7168, 8192]
DEPTHS += [9728, 12288, 14336, 16384, 17408, 18944, 25600, 28672, 32768]


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("size", [512, 151936])
@pytest.mark.parametrize("depth", DEPTHS)
def test_a_plan_fits_the_registers_and_keeps_loads_on_their_way(depth, size, in_fp8, gated) -> None:
    assert fits_gemv(depth)
    plan = choose_gemv(size, depth, in_fp8=in_fp8, gated=gated, num_sms=132)
    threads, rows, per_sm = 32 * plan.warps, plan.block_n * (2 if gated else 1), plan.per_sm
    # A load of all threads takes so many columns; where a row has more, the last load has idle threads.
    at_once = threads * (16 if in_fp8 else 8)
    loaded = -(-depth // at_once) * at_once if depth > at_once else 1 << (depth - 1).bit_length()
    # The token in float32 (FP8: in float16, as pairs), a tile, and the next one on its way.
    registers = loaded / threads / (2 if in_fp8 else 1) + 2 * rows * loaded / threads / (4 if in_fp8 else 2)
    assert registers < plan.registers or depth > (16384 if gated else 28672)  # no known model has such
    assert threads * per_sm <= 1024 and plan.registers * threads * per_sm <= 65536
    # An H200 moves 32 bytes per nanosecond and SM, and a load takes about a microsecond. Of short weights it
    # reads little after the first loads.
    least = 26 << 10 if gated and size * depth <= 65536 * 132 and not in_fp8 else 32 << 10
    assert rows * depth * per_sm * (1 if in_fp8 else 2) >= least
    assert plan.block_n & (plan.block_n - 1) == 0


def test_depths_without_a_plan() -> None:
    assert not fits_gemv(32768 + 16) and not fits_gemv(1000)
