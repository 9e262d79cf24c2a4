"""A memory service in a thread of the test, whose parts the test can exchange."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from segue.gms.server import GmsServer
from segue.gms.service import MemoryService
from segue.gms.store import SlabStore
from segue.memory.memfd import MemfdVMM
from segue.memory.vmm import VMM
from tests.gms.running import DEADLINE_S, SLAB


class SlowVMM(MemfdVMM):
    """Makes slabs, and says how large they may be, only while it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.may_create, self.may_say = threading.Event(), threading.Event()
        self.may_create.set()
        self.may_say.set()

    def create(self, size: int) -> int:
        assert self.may_create.wait(DEADLINE_S)
        return super().create(size)

    @property
    def granularity(self) -> int:
        assert self.may_say.wait(DEADLINE_S)
        return SLAB


@contextmanager
def serving(directory: Path, vmms: Mapping[str, VMM] | None = None, **options: Any) -> Iterator[Path]:
    """Run a service; the options are those of `GmsServer`."""
    loop = asyncio.new_event_loop()
    ready, ended = threading.Event(), asyncio.Event()

    async def serve() -> None:
        service = MemoryService(SlabStore(vmms or {"cpu": MemfdVMM()}))
        task = asyncio.create_task(GmsServer(service, str(directory), **options).run())
        ready.set()
        await ended.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        service.store.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(DEADLINE_S)
    try:
        yield directory
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(DEADLINE_S)
        loop.close()
