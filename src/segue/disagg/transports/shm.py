"""KV pages between processes of one host, in the memory of the CPU.

The reader's pool is shared memory. A writer maps it, and one thread copies pages into it with numpy.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

import numpy as np
import torch

from segue.disagg.layout import HeadRoute, PageShape
from segue.disagg.transports.export import PoolOffer, shape_of
from segue.disagg.transports.page_copy import Bytes, copy_pages
from segue.disagg.transports.push import MappedPool
from segue.kvcache.pool import KVPool
from segue.memory import shared


class HostPages:
    """A pool in any memory of the CPU, whose pages are pushed to pools in shared memory (`PageMemory`)."""

    def __init__(self, pool: KVPool) -> None:
        self._bytes = pool.data.view(torch.uint8).numpy().reshape(-1)
        self._shape = shape_of(pool)

    def map_pool(self, descriptor: int, offer: PoolOffer, route: HeadRoute) -> MappedPool:
        """Map a pool, to which the heads of `route` will be written.

        Raises:
            OSError, SharedMemoryError: it cannot be mapped.
        """
        memory = shared.map_shared(descriptor, offer.num_bytes)
        return _HostTarget(self._bytes, self._shape, memory, offer.shape, route)


class _HostTarget:
    """A pool in shared memory that a writer has mapped (`MappedPool`)."""

    def __init__(
        self, source: Bytes, source_shape: PageShape, memory: mmap.mmap, shape: PageShape, route: HeadRoute
    ) -> None:
        self._source = source
        self._source_shape = source_shape
        self._memory = memory
        self._shape = shape
        self._route = route

    def write(self, sources: Sequence[int], targets: Sequence[int], after: Callable[[], None]) -> None:
        """Copy pages in this thread, once `after` has returned."""
        after()
        # A mapping with a view cannot be closed, so the view exists only here.
        target = np.frombuffer(self._memory, np.uint8)
        copy_pages(self._source, self._source_shape, sources, target, self._shape, targets, self._route)

    def close(self) -> None:
        self._memory.close()
