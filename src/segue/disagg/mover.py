"""Moves KV for one rank: pushes its pages to decode workers, or lets prefill workers write to its pool.

Rank 0's commands arrive in order, and each call returns at once. Their results are reported as events, from
any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import assert_never

from segue.disagg.page_sender import PageSender
from segue.disagg.preparer import PagePreparer
from segue.disagg.transports.base import (
    ExportedPool,
    WatchedPool,
    Writer,
)
from segue.messages.kv import (
    BanWriters,
    ConnectPeer,
    DisconnectPeer,
    KVCommand,
    KVEvent,
    PreparePages,
    PushPages,
    WritersGone,
)


class PageReceiver:
    """The decode side of a rank: its pool, which prefill workers write to."""

    def __init__(
        self,
        export: Callable[[Callable[[Writer], None]], WatchedPool],
        send: Callable[[KVEvent], None],
    ) -> None:
        """``export`` lets writers in; its argument is to be called with each writer that has gone."""
        self._send = send
        self._lock = threading.Lock()
        self._banned: set[str] = set()  # sessions whose writers have not all gone
        self.pool = export(self._on_writer_gone)

    def ban(self, session: str) -> None:
        """Let nobody in for a session any more; `WritersGone` follows once nobody can write for it."""
        self.pool.ban(session)
        with self._lock:
            self._banned.add(session)
        self._check(session)

    def _on_writer_gone(self, writer: Writer) -> None:
        self._check(writer.session)

    def _check(self, session: str) -> None:
        with self._lock:
            if session not in self._banned:
                return
            if any(writer.session == session for writer in self.pool.writers()):
                return
            self._banned.remove(session)
        self._send(WritersGone(session=session))

    def close(self) -> None:
        """Let nobody in any more."""
        self.pool.close()


class Mover:
    """What one rank does to hand KV over: it sends pages, or receives them, or both."""

    def __init__(
        self,
        sender: PageSender | None,
        receiver: PageReceiver | None,
        unwatched: ExportedPool | None = None,
        preparer: PagePreparer | None = None,
    ) -> None:
        """``unwatched`` is the same pool, exported in a second way that does not know its writers."""
        self._sender = sender
        self._receiver = receiver
        self._unwatched = unwatched
        self._preparer = preparer

    def handle(self, command: KVCommand) -> None:
        """Carry out a command of rank 0; returns at once."""
        match command:
            case ConnectPeer():
                if self._sender is not None:
                    self._sender.connect(command)
            case DisconnectPeer():
                if self._sender is not None:
                    self._sender.disconnect(command)
            case PushPages():
                assert self._sender is not None, "a worker that does not prefill has no offers"
                self._sender.push(command)
            case PreparePages():
                assert self._preparer is not None, "a worker that does not decode gets no pages"
                self._preparer.prepare(command)
            case BanWriters():
                assert self._receiver is not None, "only a pool whose writers are known has any to ban"
                self._receiver.ban(command.session)
            case _:
                assert_never(command)

    def close(self) -> None:
        """End all transfers."""
        for side in (self._sender, self._receiver, self._unwatched, self._preparer):
            if side is not None:
                side.close()
