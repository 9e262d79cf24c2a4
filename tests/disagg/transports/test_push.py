"""The thread of pushes goes on after a failure, whatever the memory is that it copies to."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from segue.disagg.layout import HeadRoute
from segue.disagg.transports.base import Done, Failed
from segue.disagg.transports.export import PoolOffer
from segue.errors import SharedMemoryError, TransportError
from tests.conftest import WaitUntil
from tests.disagg.transports.ranks import WHOLE, Reader, Sender, pairs


class BrokenPages:
    """Memory of which everything fails that is told to."""

    def __init__(self, fails: str) -> None:
        self.fails = fails
        self.written: list[tuple[list[int], list[int]]] = []

    def _do(self, what: str) -> None:
        if what == self.fails:
            raise SharedMemoryError(f"{what}: the device is lost")

    def map_pool(self, descriptor: int, offer: PoolOffer, route: HeadRoute) -> BrokenPages:
        self._do("map")
        return self

    def write(self, sources: Sequence[int], targets: Sequence[int], after: Callable[[], None]) -> None:
        after()
        self._do("write")
        self.written.append((list(sources), list(targets)))

    def close(self) -> None:
        self._do("close")


def breaking(sender: Sender, fails: str) -> BrokenPages:
    sender.transport._memory = memory = BrokenPages(fails)
    return memory


def test_memory_that_cannot_be_mapped_leaves_no_writer(
    reader: Reader, sender: Sender, wait_until: WaitUntil
) -> None:
    breaking(sender, "map")
    with pytest.raises(TransportError, match=r"cannot be mapped: .*device is lost"):
        sender.connect(reader)
    wait_until(lambda: len(reader.gone) == 1 and not reader.export.writers())


def test_a_copy_that_fails_fails_its_push_alone(reader: Reader, sender: Sender) -> None:
    memory = breaking(sender, "write")
    peer = sender.connect(reader)
    event = sender.push(peer, pairs((0, 0)))
    assert isinstance(event, Failed) and "device is lost" in event.error.message
    memory.fails = ""
    assert isinstance(sender.push(peer, pairs((1, 2), (3, 4))), Done)
    assert memory.written == [([1, 3], [2, 4])]


def test_a_writer_that_cannot_unmap_is_not_taken_for_one_that_has(
    reader: Reader, sender: Sender, wait_until: WaitUntil
) -> None:
    breaking(sender, "close")
    peer = sender.connect(reader)
    sender.transport.disconnect(peer)
    wait_until(lambda: sender.transport.quiet(peer))
    again = sender.transport.connect(reader.path, reader.export.blob, WHOLE, "prefill/1", time.monotonic())
    assert isinstance(sender.push(again, pairs((0, 0))), Done), "the thread goes on"
    assert [writer.session for writer in reader.export.writers()] == ["prefill/0", "prefill/1"]
    assert reader.gone == []
