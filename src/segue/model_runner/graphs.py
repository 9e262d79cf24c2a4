"""Captured steps: one CUDA graph a bucket, replayed with new values at the same addresses.

Three kinds share one memory pool. `decode`: a step of so many decode rows, from token ids to sampled tokens.
`trunk`: any step of so many tokens, up to the hidden states of the rows that sample. `tail`: logits and plain
sampling of so many rows; it follows a trunk.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

MOST_TRUNK_TOKENS = 1024  # above it launching is no longer what a step waits for
MOST_ROWS = 512  # larger batches run eagerly: their logits alone would take the memory that graphs may have
MOST_PADDING = 2  # a step runs eagerly rather than padded to more than so many times its tokens


class Graphs:
    """Captured graphs of one kind, by size."""

    def __init__(self, pool: Any) -> None:
        """`pool`: of `torch.cuda.graph_pool_handle`, the memory that all kinds share."""
        self._pool = pool
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._sizes: list[int] = []

    def capture(self, sizes: Iterable[int], run: Callable[[int], object]) -> None:
        """Capture `run(size)` for every size, the largest first; each runs once before."""
        for size in sorted(sizes, reverse=True):
            run(size)
            torch.cuda.current_stream().synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            run(size)
            graph.capture_end()
            self._graphs[size] = graph
        self._sizes = sorted(self._graphs)

    def bucket(self, size: int) -> int | None:
        """The captured size that a step of `size` is padded to; see `pick`."""
        return pick(self._sizes, size)

    def replay(self, size: int) -> None:
        """Run the graph of a captured size on the current stream."""
        self._graphs[size].replay()

    def __len__(self) -> int:
        return len(self._graphs)


def pick(sizes: Sequence[int], size: int) -> int | None:
    """The smallest of `sizes`, in ascending order, that holds `size`; None: none, or mostly padding.

    The smallest of all may be: it costs next to nothing.
    """
    at = bisect_left(sizes, size)
    if at == len(sizes) or (sizes[at] > MOST_PADDING * size and at > 0):
        return None
    return sizes[at]


def row_sizes(most: int) -> list[int]:
    """Buckets for decode rows and for sampling rows."""
    most = min(most, MOST_ROWS)
    steps = [*range(1, 9), *range(12, 33, 4), *range(40, 129, 8), *range(144, most + 1, 16)]
    return sorted({min(size, most) for size in [*steps, most]})


def token_sizes(most: int) -> list[int]:
    """Buckets for tokens, fine where chat turns lie."""
    steps = [*range(16, 256, 16), *range(256, 512, 32), *range(512, MOST_TRUNK_TOKENS + 1, 64)]
    return [size for size in steps if size <= most]


def quiet_gc() -> None:
    """Collect garbage now: memory that is freed during a capture must not be of something older."""
    gc.collect()
    torch.cuda.empty_cache()
