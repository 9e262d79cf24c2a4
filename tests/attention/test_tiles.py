"""Tiles of attention in Triton, by the shared memory of devices that are not there."""

from __future__ import annotations

import pytest
import torch

from segue.attention.base import AttentionShape
from segue.attention.tiles import Tiles, choose_tiles
from segue.errors import ConfigError
from segue.kernels.gemm_plan import DeviceFacts

BF16, F32 = torch.bfloat16, torch.float32
KIB = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227}  # that a program may have


def choose(
    capability: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype = BF16,
    *,
    fp8: bool = False,
    group: int = 4,
) -> tuple[int, int, int]:
    shape = AttentionShape(num_heads=8 * group, num_kv_heads=8, head_dim=head_dim, scale=1.0)
    device = DeviceFacts(
        name="",
        capability=capability,
        num_sms=132,
        shared_bytes=KIB[capability] << 10,
        memory_bytes=1 << 40,
        bandwidth=1e12,
    )
    tiles = choose_tiles(shape, dtype, device, fp8=fp8)
    assert isinstance(tiles, Tiles)
    return tiles.rows, tiles.keys, tiles.decode_keys


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 192, 256])
def test_where_there_is_much_shared_memory_tiles_are_the_measured_ones(
    capability: tuple[int, int], head_dim: int
) -> None:
    assert choose(capability, head_dim) == (128, 64, 64)
    assert choose(capability, head_dim, F32) == (64, 32, 32)
    if capability >= (9, 0):
        assert choose(capability, head_dim, fp8=True) == (128, 64, 128)
        assert choose(capability, head_dim, F32, fp8=True) == (64, 32, 64)


@pytest.mark.parametrize("capability", [(8, 6), (8, 9)])
def test_where_there_is_little_tiles_of_large_heads_are_smaller(capability: tuple[int, int]) -> None:
    """The numbers are those that fit by what Triton says that it takes."""
    assert choose(capability, 128) == (128, 64, 64)
    assert choose(capability, 256) == (64, 32, 64)
    assert choose(capability, 256, group=64) == (64, 32, 32)
    assert choose(capability, 256, F32) == (32, 16, 32)


def test_keys_and_values_in_fp8_leave_room_for_larger_tiles() -> None:
    assert choose((8, 9), 256, fp8=True) == (64, 64, 128)
    assert choose((8, 9), 256, F32, fp8=True) == (64, 16, 32)


def test_where_no_tile_fits_the_error_says_what_does() -> None:
    with pytest.raises(
        ConfigError, match=r"heads of 512 in torch\.float32, 4 .* the 99 KiB .* --dtype bfloat16"
    ):
        choose((8, 9), 512, F32)
    with pytest.raises(
        ConfigError, match="64 query heads per key-value head"
    ):  # a tile has one query at least
        choose((8, 9), 256, F32, group=64)
