"""Dummy weights: each value follows from the seed, the checkpoint's tensor name and the index in that tensor.

So each rank of any tensor-parallel group holds slices of the weights of a single process, on any device.
"""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from segue.memory.arena import Arena
from segue.models.destination import Destination, destination_of
from segue.models.weight_map import Shape, WeightMap

STD = 0.02

# Elements computed per block. On CPU a small block stays in a core's cache, and torch runs it on one thread.
_BLOCK_ELEMENTS = 1 << 15
_BLOCK_ELEMENTS_CUDA = 1 << 25
_NORM_SUFFIX = "norm.weight"

# The sum of a hash's four bytes is close to normal, with this mean and standard deviation.
_BYTES_MEAN = 510
_BYTES_STD = (4 * (256**2 - 1) / 12) ** 0.5


def fill(arena: Arena, weight_map: WeightMap, seed: int, dtype: torch.dtype) -> Iterator[int]:
    """Fill all weights of a rank: norms around 1, all others around 0, with standard deviation STD.

    `weight_map` says which part of which checkpoint tensor each of this rank's parameters holds. `dtype` is
    that of weights that are not in FP8. Yields the bytes of each block that is filled.
    """
    for name in weight_map.names:
        for part in weight_map.slices[name]:
            target = destination_of(arena.view, weight_map, part, dtype)
            yield from _fill(target, seed, name, weight_map.shapes[name])


def _fill(destination: Destination, seed: int, name: str, shape: Shape) -> Iterator[int]:
    """Fill a part of the checkpoint tensor called `name`, which has `shape`: one or two dimensions.

    `name` also tells whether the tensor is a norm. Values are computed for blocks of rows, which bounds the
    memory; yields the bytes of each block.
    """
    target, box = destination.values, destination.source
    if destination.scales is not None:  # which depend on whole rows
        box = (box[0], slice(0, shape[1]))
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    key = int.from_bytes(digest[:4], "little", signed=True)
    mean = 1.0 if name.endswith(_NORM_SUFFIX) else 0.0
    columns = box[1] if len(box) > 1 else slice(0, 1)
    width = columns.stop - columns.start
    limit = _BLOCK_ELEMENTS_CUDA if target.device.type == "cuda" else _BLOCK_ELEMENTS
    step = max(1, limit // max(width, 1))
    column = torch.arange(columns.start, columns.stop, dtype=torch.int32, device=target.device)
    for row in range(0, len(target), step):
        block = target[row : row + step]
        first = box[0].start + row
        rows = torch.arange(first, first + len(block), dtype=torch.int32, device=target.device)
        # The row is hashed first, then the column: an element's index may exceed a fast hash's 32 bits.
        hashes = _mix(_mix(rows.add_(key))[:, None] + column)
        values = _normal(hashes).mul_(STD / _BYTES_STD).add_(mean)
        if destination.scales is None:
            block.copy_(values.view(block.shape))
        else:
            destination.write_rows(values, row)
        yield sum(each[row : row + step].nbytes for each in destination.tensors)


def _mix(x: Tensor) -> Tensor:
    """Hash int32 numbers in place; every bit of the result depends on every bit of the input.

    The shifts and factors are those of a well-tested 32-bit hash. Torch shifts signed numbers arithmetically;
    the masks clear the copies of the sign bit that such a shift brings in.
    """
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << 32 - shift) - 1)).mul_(factor)
    return x.bitwise_xor_((x >> 15).bitwise_and_((1 << 17) - 1))


def _normal(hashes: Tensor) -> Tensor:
    """Return the sum of each hash's four bytes less its mean, exact in float32; it is close to normal.

    The bytes are added in pairs first: an int32 holds two such sums, each in 16 bits.
    """
    pairs = ((hashes >> 8).bitwise_and_(0x00FF00FF)).add_(hashes.bitwise_and_(0x00FF00FF))
    return (pairs >> 16).add_(pairs.bitwise_and_(0xFFFF)).sub_(_BYTES_MEAN).float()
