"""The mover of a rank, with a transport that cannot connect."""

from __future__ import annotations

import errno
import time
from queue import SimpleQueue
from typing import Any

import pytest

from segue.disagg.mover import Mover
from segue.disagg.page_sender import PageSender
from segue.errors import TransportError
from segue.messages.kv import ConnectPeer, DisconnectPeer, KVEvent, PushEnded, PushPages
from tests.support.kv_hello import hello


class DeafTransport:
    """A transport whose connections fail."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def connect(self, *_: Any) -> int:
        raise self.error


@pytest.mark.parametrize(
    "error", [TransportError("nobody answers"), OSError(errno.EMFILE, "Too many open files")], ids=repr
)
def test_pushes_to_pools_that_cannot_be_opened_end(error: Exception) -> None:
    events: SimpleQueue[KVEvent] = SimpleQueue()
    transport: Any = DeafTransport(error)
    sender = PageSender(
        {"shm": lambda _: transport}, rank=0, tp=1, queue_behind=lambda _: None, send=events.put
    )
    mover, decode = Mover(sender, None), hello("decode", kv_heads=2)
    mover.handle(
        ConnectPeer(
            session="s", opened_at=time.monotonic(), transport="shm", tp=1, kv_heads=2, ranks=decode.ranks
        )
    )
    mover.handle(PushPages(ticket=1, session="s", sources=[1], targets=[2], after_step=0))
    ended = events.get(timeout=10)
    assert isinstance(ended, PushEnded) and ended.ticket == 1
    assert str(error).rsplit("]")[-1].strip() in ended.error
    mover.handle(DisconnectPeer(session="s"))
