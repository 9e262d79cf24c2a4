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


class GroupedCopy:
    """Copies of tensors onto others, all with one kernel, as often as it is called.

    Both of a pair are contiguous and hold as many bytes, on the current device or in pinned memory of the
    host; no target overlaps anything else. The kernel moves 16 bytes at a time where all addresses and sizes
    are multiples of 16.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Note where each pair's second tensor is and its first, to which it goes; on the current stream."""
        self._pairs = [(to, source) for to, source in pairs if to.nbytes]
        for to, source in self._pairs:
            assert to.is_contiguous() and source.is_contiguous() and to.nbytes == source.nbytes
        if not self._pairs:
            return
        table = np.array([(to.data_ptr(), source.data_ptr(), to.nbytes) for to, source in self._pairs])
        self._step = gcd(16, int(np.gcd.reduce(table, axis=None)))
        device = next(tensor.device for pair in self._pairs for tensor in pair if tensor.is_cuda)
        self._pieces = torch.from_numpy(_pieces(table, min(self._step, 8))).to(device)

    def __call__(self) -> None:
        """Copy, on the current stream.

        The kernel starts when everything before it has ended and lets nothing behind it start early, so it
        may overwrite weights.
        """
        if not self._pairs:
            return
        width = min(self._step, 8)
        _copy[(len(self._pieces),)](
            self._pieces,
            WORD=_WORDS[width],
            ALIGNED=self._step == 16,
            BLOCK=_BLOCK_BYTES // width,
            num_warps=4,
        )


def _pieces(table: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """int64 `[n, 3]`: addresses of target and source, words. `table`: the same of whole pairs, bytes."""
    counts = -(-table[:, 2] // _PIECE)
    pair = np.repeat(np.arange(len(table)), counts)
    start = (np.arange(len(pair)) - np.repeat(np.cumsum(counts) - counts, counts)) * _PIECE
    to, source, size = table[pair].T
    return np.stack([to + start, source + start, np.minimum(size - start, _PIECE) // width], axis=1)
