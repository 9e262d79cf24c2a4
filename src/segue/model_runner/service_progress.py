"""Reports to the memory service that a load of weights makes progress, so that it keeps its lease."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from segue.errors import MemoryServiceError
from segue.gms.client import GmsClient

BEAT_S = 5.0  # between reports of progress; a loader without any for 60 s loses its lease


@contextmanager
def reporting(client: GmsClient, lease: int) -> Iterator[None]:
    """Report the progress of a load from a thread, as long as there is some."""
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(BEAT_S):
            try:
                client.progress(lease, _work_done())
            except MemoryServiceError:
                return  # the load's own next call has the same error

    thread = threading.Thread(target=report, name="segue-gms-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _work_done() -> int:
    """Return a number that grows while this process reads or computes, and not while it hangs."""
    with open("/proc/self/io") as file:
        num_bytes = int(file.readline().split()[1])
    # The reports themselves read and compute a little, which must not count.
    return (num_bytes >> 20 << 20) + (int(time.process_time() * 2) << 20)
