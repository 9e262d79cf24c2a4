"""Made-up weights: each value follows from the seed, the checkpoint's tensor name and its place in there.

So a rank of any tensor-parallel group holds slices of what a single process holds, on any device.
"""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from segue.memory.arena import Arena
from segue.models.weight_map import Box, WeightMap

STD = 0.02

# Made at once. On CPU what is small stays in a core's cache and is not worth a thread pool to torch.
_BLOCK_ELEMENTS = 1 << 15
_BLOCK_ELEMENTS_CUDA = 1 << 25
_NORM_SUFFIX = "norm.weight"

# The sum of a hash's four bytes is close to normal, with this mean and standard deviation.
_BYTES_MEAN = 510
_BYTES_STD = (4 * (256**2 - 1) / 12) ** 0.5


def fill(arena: Arena, table: WeightMap, seed: int) -> Iterator[int]:
    """Make up all weights of a rank, norms near 1, all else near 0 with deviation STD; yields bytes done."""
    for name in table.names:
        mean = 1.0 if name.endswith(_NORM_SUFFIX) else 0.0
        for part in table.slices[name]:
            target = arena.view(part.parameter)[part.destination]
            if target.dim() > len(part.source):  # one expert's matrix, for a parameter that has all of them
                target = target[0]
            yield from _fill(target, _key(seed, name), table.shapes[name], part.source, mean)


def values(seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """The whole float32 tensor called `name`; norms are told by their name. On CPU."""
    target = torch.empty(shape)
    box = tuple(slice(0, size) for size in shape)
    for _ in _fill(target, _key(seed, name), shape, box, 1.0 if name.endswith(_NORM_SUFFIX) else 0.0):
        pass
    return target


def _key(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:4], "little", signed=True)


def _fill(target: Tensor, key: int, shape: tuple[int, ...], box: Box, mean: float) -> Iterator[int]:
    columns = box[1] if len(box) > 1 else slice(0, 1)
    width = columns.stop - columns.start
    limit = _BLOCK_ELEMENTS_CUDA if target.device.type == "cuda" else _BLOCK_ELEMENTS
    step = max(1, limit // max(width, 1))
    column = torch.arange(columns.start, columns.stop, dtype=torch.int32, device=target.device)
    for row in range(0, len(target), step):
        block = target[row : row + step]
        first = box[0].start + row
        rows = torch.arange(first, first + len(block), dtype=torch.int32, device=target.device)
        # Row and column are hashed one after the other: a place may need more than a fast hash's 32 bits.
        hashes = _mix(_mix(rows.add_(key))[:, None] + column)
        block.copy_(_normal(hashes).mul_(STD / _BYTES_STD).add_(mean).view(block.shape))
        yield block.nbytes


def _mix(x: Tensor) -> Tensor:
    """Hash int32 numbers in place; every bit of the result depends on every bit given."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << 32 - shift) - 1)).mul_(factor)
    return x.bitwise_xor_((x >> 15).bitwise_and_((1 << 17) - 1))


def _normal(hashes: Tensor) -> Tensor:
    """The centred sum of each hash's bytes, as float32, exact."""
    pairs = ((hashes >> 8).bitwise_and_(0x00FF00FF)).add_(hashes.bitwise_and_(0x00FF00FF))
    return (pairs >> 16).add_(pairs.bitwise_and_(0xFFFF)).sub_(_BYTES_MEAN).float()
