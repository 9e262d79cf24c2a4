"""Many copies in one kernel."""

from collections.abc import Sequence
from math import gcd

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

_PIECE = 1 << 18  # bytes a program copies, at most; 4.05 TB/s on an H200 so, read and written
_BLOCK_BYTES = 32768
_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit
def _copy(pieces, WORD: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    at = pieces + tl.program_id(0) * 3
    to, source, count = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    if ALIGNED:  # known to the compiler, which then moves 16 bytes at a time
        to, source = tl.multiple_of(to, 16), tl.multiple_of(source, 16)
    kind = tl.pointer_type(WORD)
    lane = tl.arange(0, BLOCK)
    for start in range(0, count, BLOCK):
        i = start + lane
        values = tl.load(source.to(kind) + i, mask=i < count)
        tl.store(to.to(kind) + i, values, mask=i < count)


def grouped_copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy each pair's second tensor onto its first, all with one kernel on the current stream.

    Both of a pair are contiguous and hold as many bytes, on the current device or in pinned memory of the
    host; no target overlaps anything else. The kernel starts when everything before it has ended and lets
    nothing behind it start early, so it may overwrite weights. It moves 16 bytes at a time
    where all addresses and sizes are multiples of 16.
    """
    pairs = [(to, source) for to, source in pairs if to.nbytes]
    for to, source in pairs:
        assert to.is_contiguous() and source.is_contiguous() and to.nbytes == source.nbytes
    if not pairs:
        return
    step = gcd(16, *(size for to, source in pairs for size in (to.data_ptr(), source.data_ptr(), to.nbytes)))
    width = min(step, 8)
    pieces = np.concatenate([_pieces(to, source, width) for to, source in pairs])
    device = next(tensor.device for pair in pairs for tensor in pair if tensor.is_cuda)
    _copy[(len(pieces),)](
        torch.from_numpy(pieces).to(device),
        WORD=_WORDS[width],
        ALIGNED=step == 16,
        BLOCK=_BLOCK_BYTES // width,
        num_warps=4,
    )


def _pieces(to: Tensor, source: Tensor, width: int) -> NDArray[np.int64]:
    """int64 `[n, 3]`: addresses of target and source, words."""
    starts = np.arange(0, to.nbytes, _PIECE)
    sizes = np.minimum(to.nbytes - starts, _PIECE) // width
    return np.stack([to.data_ptr() + starts, source.data_ptr() + starts, sizes], axis=1)
