"""KV pages between GPUs of one host, or between two processes on one GPU.

The reader's pool is memory of its GPU with a descriptor. A writer maps it, and its own GPU copies pages to
it over NVLink or PCIe, on a stream beside that of the steps. The GPU itself makes the copies wait for the
step that computes the pages, so the host does nothing between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from segue.disagg.layout import HeadRoute, PageShape, row_runs
from segue.disagg.transports.export import PoolOffer, shape_of
from segue.disagg.transports.push import MappedPool
from segue.kernels.compilations import compiled_together
from segue.kvcache.pool import KVPool
from segue.memory import cuda_driver as cuda
from segue.memory.device_shared import DeviceMapping, open_descriptor


class DevicePages:
    """A pool in memory of a GPU, whose pages are pushed to pools of GPUs (`PageMemory`)."""

    def __init__(self, pool: KVPool) -> None:
        device = pool.data.device
        self._shape = shape_of(pool)
        self._address = pool.data.data_ptr()
        self._side = SideStream(device)
        self._device = device

    def map_pool(self, descriptor: int, offer: PoolOffer, route: HeadRoute) -> MappedPool:
        """Map a pool, to which the heads of `route` will be written.

        Raises:
            SharedMemoryError: it cannot be mapped.
        """
        mapping = open_descriptor(descriptor, offer.num_bytes, self._device)
        if route.covers(self._shape, offer.shape):
            return _WholePages(self._side, self._address, mapping, self._shape.page_bytes)
        return _Slices(self._side, self._address, mapping, self._shape, offer.shape, route)


def warm_up(pool: KVPool) -> None:
    """Compile the kernel that copies some heads of a page, for any number of them: a peer may need any."""
    from segue.kernels.triton.page_slices import copy_slices

    shape, address, device = shape_of(pool), pool.data.data_ptr(), pool.data.device
    pages = torch.zeros((2, 1), dtype=torch.int64, device=device)
    with compiled_together(device):
        for num_heads in range(1, shape.num_heads + 1):
            run = num_heads * shape.head_bytes
            copy_slices(address, address, pages, num_rows=1, source_row=run, target_row=run, run=run)


class SideStream:
    """The stream of a GPU that pages are copied on; the stream of the steps has a higher priority."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # A thread that waits for the first of them sleeps in the driver until the step has ended. The copies
        # run while it wakes up. Then it polls the second one, without the GIL, as copies last milliseconds.
        self._begun = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def run(self, after: Callable[[], None], queue: Callable[[int], None]) -> None:
        """Call `after`, then `queue` with the stream, which is the current one; wait for what is queued.

        `after` makes the current stream wait for a step. Only one thread calls this at a time. If `queue`
        fails, what it has queued before has ended too when the error is raised.
        """
        with torch.cuda.stream(self._stream):
            cuda.use_device(self._device.index)
            after()
            self._begun.record()
            try:
                queue(self._stream.cuda_stream)
            finally:
                self._done.record()
                self._begun.synchronize()
                self._done.synchronize()


class _WholePages:
    """A pool whose pages have the same heads as this rank's (`MappedPool`)."""

    def __init__(self, side: SideStream, source: int, mapping: DeviceMapping, page_bytes: int) -> None:
        self._side = side
        self._source = source
        self._mapping = mapping
        self._page_bytes = page_bytes

    def write(self, sources: Sequence[int], targets: Sequence[int], after: Callable[[], None]) -> None:
        """Copy whole pages with the copy engines, which takes no SM."""
        size = self._page_bytes
        to = page_addresses(self._mapping.address, targets, size)
        from_ = page_addresses(self._source, sources, size)
        self._side.run(after, lambda stream: cuda.copy_pages(to, from_, size, stream))

    def close(self) -> None:
        self._mapping.close()


class _Slices:
    """A pool with other heads than this rank's, of which some are copied (`MappedPool`)."""

    def __init__(
        self,
        side: SideStream,
        source: int,
        mapping: DeviceMapping,
        source_shape: PageShape,
        target_shape: PageShape,
        route: HeadRoute,
    ) -> None:
        self._side = side
        self._source = source
        self._mapping = mapping
        self._runs = row_runs(route, source_shape, target_shape)

    def write(self, sources: Sequence[int], targets: Sequence[int], after: Callable[[], None]) -> None:
        """Copy a run of each row with a kernel of few programs."""
        from segue.kernels.triton.page_slices import copy_slices

        runs = self._runs
        pages = torch.tensor([list(sources), list(targets)], dtype=torch.int64).pin_memory()

        def queue(stream: int) -> None:
            copy_slices(
                self._source + runs.source_start,
                self._mapping.address + runs.target_start,
                pages.cuda(non_blocking=True),
                num_rows=runs.num_rows,
                source_row=runs.source_row,
                target_row=runs.target_row,
                run=runs.run,
            )

        self._side.run(after, queue)

    def close(self) -> None:
        self._mapping.close()


def page_addresses(pool: int, pages: Sequence[int], page_bytes: int) -> NDArray[np.uint64]:
    """Return the addresses of pages of a pool, which begins at the address `pool`."""
    return np.uint64(pool) + np.array(pages, np.uint64) * np.uint64(page_bytes)
