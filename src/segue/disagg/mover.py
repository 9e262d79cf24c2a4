"""Moves KV for one rank: pushes its pages to decode workers, or lets prefill workers write to its pool.

Rank 0's commands arrive in order, and each call returns at once. Their results are reported as events, from
any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

from segue.disagg import layout
from segue.disagg.layout import HeadRoute
from segue.disagg.transports.base import Done, ExportedPool, Failed, PagePair, Peer, Transport, Writer
from segue.errors import TransportError
from segue.logs import logger
from segue.messages.kv import (
    BanWriters,
    ConnectPeer,
    DisconnectPeer,
    KVCommand,
    KVEvent,
    PushEnded,
    PushPages,
    WritersGone,
)


@dataclass(slots=True, kw_only=True, eq=False)
class _Session:
    """The pools of one decode worker that this rank pushes to."""

    peers: list[Peer] | None = None  # None: they are being connected
    error: str = ""  # why they cannot be pushed to
    waiting: list[PushPages] = field(default_factory=list)  # until they are connected
    has_ended: bool = False


class PageSender:
    """The prefill side of a rank."""

    def __init__(
        self,
        make_transport: Callable[[Callable[[], None]], Transport],
        *,
        rank: int,
        tp: int,
        await_step: Callable[[int], None],
        send: Callable[[KVEvent], None],
    ) -> None:
        """Push pages of this rank's pool.

        Args:
            make_transport: makes the transport; its argument is to be called when a push has ended.
            rank: this rank's number.
            tp: the worker's number of ranks.
            await_step: returns once a step has ended, and raises if it failed.
            send: takes events; any thread calls it.
        """
        self._transport = make_transport(self._report)
        self._rank, self._tp = rank, tp
        self._await_step = await_step
        self._send = send
        self._lock = threading.Lock()  # of all below
        self._sessions: dict[str, _Session] = {}
        self._parts: dict[int, int] = {}  # a push's ticket at the transport -> rank 0's
        self._missing: dict[int, int] = {}  # rank 0's ticket -> pushes at the transport that have not ended
        self._errors: dict[int, str] = {}

    def connect(self, command: ConnectPeer) -> None:
        """Open the pools of a decode worker's ranks, in a thread: it may take seconds."""
        session = _Session()
        with self._lock:
            self._sessions[command.session] = session
        thread = threading.Thread(target=partial(self._connect, session, command), name="segue-kv-connect")
        thread.daemon = True
        thread.start()

    def _connect(self, session: _Session, command: ConnectPeer) -> None:
        peers: list[Peer] = []
        error = ""
        try:
            for route in layout.plan(self._tp, command.tp, command.kv_heads):
                if route.source_rank == self._rank:
                    peers.append(self._connect_rank(command, route))
        except TransportError as failure:
            logger.warning("pages cannot be pushed to a decode worker: %s", failure)
            error = failure.message
        except Exception as failure:  # no descriptor is free, for example; pushes must not wait for ever
            logger.exception("the KV pools of a decode worker cannot be opened")
            error = f"its KV pools cannot be opened: {failure!r}"
        with self._lock:
            session.peers, session.error = peers, error
            waiting, session.waiting = session.waiting, []
            has_ended = session.has_ended
        for push in waiting:
            self._post(session, push)
        if has_ended or error:
            for peer in peers:
                self._transport.disconnect(peer)

    def _connect_rank(self, command: ConnectPeer, route: HeadRoute) -> Peer:
        address = command.ranks[route.target_rank]
        blob = next(offer.blob for offer in address.offers if offer.kind == command.transport)
        return self._transport.connect(address.path, blob, route, command.session)

    def disconnect(self, command: DisconnectPeer) -> None:
        """Give up the pools of a decode worker, after all that was to be pushed to it."""
        with self._lock:
            session = self._sessions.pop(command.session)
            session.has_ended = True
            peers = session.peers or []
        for peer in peers:
            self._transport.disconnect(peer)

    def push(self, command: PushPages) -> None:
        """Push pages to a decode worker, once they are computed; `PushEnded` follows."""
        with self._lock:
            session = self._sessions.get(command.session)
            if session is not None and session.peers is None:
                session.waiting.append(command)
                return
        if session is None:
            self._send(PushEnded(ticket=command.ticket, error="the connection is lost"))
        else:
            self._post(session, command)

    def _post(self, session: _Session, command: PushPages) -> None:
        """Post a push to the pools of all ranks that need pages of this one."""
        pages = [PagePair(source=s, target=t) for s, t in zip(command.sources, command.targets, strict=True)]
        after = partial(self._await_step, command.after_step)
        error = session.error
        with self._lock:  # so that no part is reported before it is known
            count = 0
            for peer in [] if error else session.peers or []:
                try:
                    self._parts[self._transport.push(peer, pages, after)] = command.ticket
                    count += 1
                except TransportError as failure:
                    error = failure.message
            if count:
                self._missing[command.ticket], self._errors[command.ticket] = count, error
                return
        self._send(PushEnded(ticket=command.ticket, error=error))

    def _report(self) -> None:
        """Report pushes that have ended; the transport calls it."""
        ended: list[PushEnded] = []
        with self._lock:
            for event in self._transport.poll():
                ticket = self._parts.pop(event.ticket)
                match event:
                    case Failed():
                        self._errors[ticket] = event.error.message
                    case Done():
                        pass
                self._missing[ticket] -= 1
                if not self._missing[ticket]:
                    del self._missing[ticket]
                    ended.append(PushEnded(ticket=ticket, error=self._errors.pop(ticket)))
        for message in ended:
            self._send(message)

    def close(self) -> None:
        """Disconnect everything, and wait until all that is posted has ended."""
        self._transport.close()


class PageReceiver:
    """The decode side of a rank: its pool, which prefill workers write to."""

    def __init__(
        self,
        export: Callable[[Callable[[Writer], None]], ExportedPool],
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

    def __init__(self, sender: PageSender | None, receiver: PageReceiver | None) -> None:
        self._sender = sender
        self._receiver = receiver

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
            case BanWriters():
                assert self._receiver is not None, "a worker that does not decode claims nothing"
                self._receiver.ban(command.session)
            case _:
                assert_never(command)

    def close(self) -> None:
        """End all transfers."""
        for side in (self._sender, self._receiver):
            if side is not None:
                side.close()
