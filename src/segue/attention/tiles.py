"""The tiles of attention in Triton: the largest ones that fit into the shared memory of a program."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from segue.attention.base import AttentionShape
from segue.errors import ConfigError
from segue.kernels.gemm_plan import DeviceFacts
from segue.sizes import next_power_of_2

_SIZES = (128, 64), (64, 64), (64, 32), (64, 16), (32, 16)  # rows and keys of prefill tiles, the best first


@dataclass(frozen=True, slots=True)
class Tiles:
    """The sizes of tiles."""

    rows: int  # of a prefill tile, at most: one per query token and query head of the group
    keys: int  # of a prefill tile
    decode_keys: int


def choose_tiles(shape: AttentionShape, dtype: torch.dtype, device: DeviceFacts, *, fp8: bool) -> Tiles:
    """Return the tiles for a model of `dtype` on a device; with `fp8` keys and values are in FP8.

    Raises:
        ConfigError: no tile fits.
    """
    width, size = max(16, next_power_of_2(shape.head_dim)), dtype.itemsize
    group = shape.num_heads // shape.num_kv_heads

    def fits(rows: int, keys: int, copies: int = 1) -> bool:
        """Whether queries, keys and values, `copies` of both at a time, and the weights of values fit.

        That is what Triton takes at most, for compute capabilities 8.0 to 10.0. Keys in FP8 that tensor cores
        cannot read from registers are there once more, widened.
        """
        per_key = 2 * copies * (1 if fp8 else size) + (size if fp8 and (size == 4 or device.has_tma) else 0)
        return width * (rows * size + keys * per_key) + rows * keys * size <= device.shared_bytes

    copies = 2 if device.has_tma and size == 2 else 1
    sizes = _SIZES if size == 2 else _SIZES[2:]
    prefill = next((each for each in sizes if each[0] >= group and fits(*each, copies)), None)
    most = (64 if size == 2 else 32) * (2 if fp8 else 1)  # as many bytes in flight
    rows = max(16, next_power_of_2(group))
    decode = next((keys for keys in (128, 64, 32, 16) if keys <= most and fits(rows, keys)), None)
    if prefill is None or decode is None:
        raise ConfigError(
            f"attention in Triton with heads of {shape.head_dim} in {dtype}, {group} query heads per "
            f"key-value head, needs more than the {device.shared_bytes >> 10} KiB of shared memory that a "
            "program may have on this device; use --dtype bfloat16, or a device with more"
        )
    return Tiles(*prefill, decode_keys=decode)
