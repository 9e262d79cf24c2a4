"""Many copies, or many checks for non-finite values, in one kernel launch.

The tensors are divided into chunks, for one program each: a table, int64 `[n, 3]`, has two addresses and a
number of 8-byte words for each chunk.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16  # bytes
_CHUNK_BYTES = 1 << 18  # per program; copies reach 4.05 TB/s on an H200 with it, read and written
_BLOCK = tl.constexpr(4096)  # 8-byte words
_BACKGROUND_PROGRAMS = 32
# dtype -> masks for a word of several values: the exponents (all ones if not finite), all but the top bits
_LANES = {
    torch.bfloat16: (0x7F80_7F80_7F80_7F80, 0x7FFF_7FFF_7FFF_7FFF),
    torch.float16: (0x7C00_7C00_7C00_7C00, 0x7FFF_7FFF_7FFF_7FFF),
    torch.float32: (0x7F80_0000_7F80_0000, 0x7FFF_FFFF_7FFF_FFFF),
}


@triton.jit(do_not_specialize=["num_chunks"])
def _copy(chunks, num_chunks):
    """Copy chunks from their first address to their second one; fewer programs than chunks take turns."""
    word = tl.pointer_type(tl.int64)
    lane = tl.arange(0, _BLOCK)
    for chunk in range(tl.program_id(0), num_chunks, tl.num_programs(0)):
        at = chunks + chunk * 3
        # The alignment hint lets the compiler move 16 bytes at a time.
        source, to = tl.multiple_of(tl.load(at), 16), tl.multiple_of(tl.load(at + 1), 16)
        count = tl.load(at + 2)
        for start in range(0, count, _BLOCK):
            i = start + lane
            tl.store(to.to(word) + i, tl.load(source.to(word) + i, mask=i < count), mask=i < count)


@triton.jit
def _find_non_finite(chunks, EXPONENT: tl.constexpr, LOWER_BITS: tl.constexpr):
    """Set the flag at a chunk's second address (int32) to 1 if the chunk has an infinity or NaN.

    A word holds several values, which are checked at once with the masks of `_LANES`. A value is not finite
    if all bits of its exponent are ones.
    """
    at = chunks + tl.program_id(0) * 3
    source, count = tl.multiple_of(tl.load(at), 16), tl.load(at + 2)
    words = source.to(tl.pointer_type(tl.int64))
    lane = tl.arange(0, _BLOCK)
    found = tl.zeros((_BLOCK,), tl.int64)
    for start in range(0, count, _BLOCK):
        i = start + lane
        exponents = (tl.load(words + i, mask=i < count, other=0) & EXPONENT) ^ EXPONENT
        # Sets the top bit of each value whose exponent is all ones; no carry reaches the next value.
        found |= ~(exponents + LOWER_BITS) & ~LOWER_BITS
    if tl.max((found != 0).to(tl.int32)) > 0:
        tl.store(tl.load(at + 1).to(tl.pointer_type(tl.int32)), 1)


def is_aligned(tensor: Tensor) -> bool:
    """Returns whether the kernels take a tensor: contiguous, address and size multiples of 16 bytes."""
    return tensor.is_contiguous() and (tensor.data_ptr() | tensor.nbytes) % ALIGNMENT == 0


def can_check_finite(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether :func:`are_finite` can check a tensor for non-finite values of ``dtype``."""
    return tensor.dtype == dtype and dtype in _LANES and is_aligned(tensor)


class GroupedCopy:
    """Copies a fixed list of tensors onto others, with one kernel launch per call.

    The tensors of a pair have the same size, are aligned (see `is_aligned`), and lie on the current device or
    in pinned host memory; no target overlaps another tensor of the list.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], *, in_background: bool = False) -> None:
        """Record the addresses of ``pairs`` of target and source; uploads them on the current stream.

        With ``in_background`` the copy uses few programs: it is slower, and leaves SMs for other kernels.
        """
        assert all(
            is_aligned(to) and is_aligned(source) and to.nbytes == source.nbytes for to, source in pairs
        )
        self._pairs = pairs  # keeps the tensors alive
        device = next((tensor.device for pair in pairs for tensor in pair if tensor.is_cuda), None)
        table = _chunks(
            [(source.data_ptr(), to.data_ptr(), to.nbytes) for to, source in pairs], advance_second=True
        )
        self._chunks = torch.from_numpy(table).to(device)
        self._num_programs = min(len(table), _BACKGROUND_PROGRAMS) if in_background else len(table)

    def __call__(self) -> None:
        """Copy, on the current stream.

        The kernel is launched without programmatic dependent launch: it starts when all earlier kernels have
        ended, and no later kernel starts before it ends. So it may overwrite weights.
        """
        if self._num_programs:
            _copy[(self._num_programs,)](chunks=self._chunks, num_chunks=len(self._chunks), num_warps=4)


def are_finite(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Returns for each tensor whether it has neither infinities nor NaN: bool `[n]` on the tensors' device.

    All tensors have to be on the current device and to satisfy `can_check_finite`.
    """
    found = torch.zeros(len(tensors), dtype=torch.int32, device=tensors[0].device)
    flags = range(found.data_ptr(), found.data_ptr() + found.nbytes, found.itemsize)
    table = _chunks([(each.data_ptr(), flag, each.nbytes) for each, flag in zip(tensors, flags, strict=True)])
    chunks = torch.from_numpy(table).to(found.device)
    exponent, lower_bits = _LANES[dtype]
    if len(chunks):
        _find_non_finite[(len(chunks),)](chunks=chunks, EXPONENT=exponent, LOWER_BITS=lower_bits, num_warps=4)
    return found == 0


def _chunks(rows: Sequence[tuple[int, int, int]], *, advance_second: bool = False) -> NDArray[np.int64]:
    """Split ``rows`` of two addresses and a number of bytes into chunks, int64 `[n, 3]`.

    A row that is larger than `_CHUNK_BYTES` gives several chunks. Their second address advances with the
    first one only with ``advance_second``: it does for a copy's target, and does not for a flag.
    """
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    counts = -(-table[:, 2] // _CHUNK_BYTES)
    row = np.repeat(np.arange(len(table)), counts)
    start = (np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)) * _CHUNK_BYTES
    first, second, size = table[row].T
    second = second + start if advance_second else second
    return np.stack([first + start, second, np.minimum(size - start, _CHUNK_BYTES) // 8], axis=1)
