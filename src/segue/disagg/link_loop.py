"""The thread that serves all connections to other workers: a selector, and what becomes due."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from typing import cast

from segue.disagg.addresses import SocketAddress, address_of, close_listener
from segue.disagg.call_queue import CallQueue
from segue.disagg.handshake import LinkSide
from segue.disagg.link import Link, LinkPhase, LinkSettings
from segue.errors import KVLinkError, KVLinkLostError, KVRefusedError
from segue.logs import logger
from segue.messages.kv_link import LinkCloseCode, LinkClosed, LinkEvent, LinkOpened

MAX_LINKS = 256  # when there are as many, new connections are refused
MAX_HALF_OPEN = 16  # accepted ones that are not open; a further one takes the place of the oldest
READ_BYTES = 256 << 10  # of one connection, before others have their turn
WARN_AGAIN_S = 10.0  # between two warnings of refused connections, which anybody can open
ACCEPT_AGAIN_S = 1.0  # how long nothing is accepted after the process ran out of descriptors


class LinkLoop:
    """The connections of a worker and their thread, which runs :meth:`run` and everything else here.

    Other threads use :attr:`calls`, and may look into :attr:`open`.
    """

    def __init__(
        self,
        listener: socket.socket | None,
        settings: LinkSettings,
        on_event: Callable[[LinkEvent], None],
        numbers: Iterator[int],
    ) -> None:
        self._settings = settings
        self._on_event = on_event
        self._numbers = numbers
        self._listener: socket.socket | None = None
        self.address: str | None = None
        self.open: dict[int, Link] = {}
        self._links: dict[int, Link] = {}  # in any phase but CLOSED, the oldest first
        self._expected: set[int] = set()  # peers whose address is being looked up
        self._is_stopping = False
        self._chunk = memoryview(bytearray(READ_BYTES))
        self._due = inf  # no deadline is before this time
        self._accept_at = inf  # when to accept again
        self._warn_at = 0.0  # before this time no warning of a refused connection is logged
        self.calls = CallQueue()
        self._selector = selectors.DefaultSelector()  # the data of a key is what to call
        self._selector.register(self.calls.fd, selectors.EVENT_READ, self.calls.run)
        if listener is not None:
            self.start_listening(listener)

    def start_listening(self, listener: socket.socket) -> None:
        """Accept the connections of a socket that listens."""
        self._listener, self.address = listener, address_of(listener)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def run(self) -> None:
        """Serve the connections until :meth:`stop`, and all of them have ended."""
        try:
            while self._links or not self._is_stopping:
                now = time.monotonic()
                timeout = None if self._due == inf else max(0.0, self._due - now)
                for key, _ in self._selector.select(timeout):
                    key.data()
                # What had come by `now` has been read. So a process that was stopped does not take its own
                # absence for the silence of others.
                if now >= self._due:
                    self._tick(now)
        finally:
            self.calls.close()
            self.stop_listening()
            self._selector.close()
            for link in self._links.values():
                link.close()

    def stop(self) -> None:
        """Accept nothing more, and close all connections."""
        self._is_stopping = True
        self.stop_listening()
        for peer in [*self._links, *self._expected]:
            self.disconnect(peer, "the worker shuts down")

    def stop_listening(self) -> None:
        """Accept no more connections; those that exist stay."""
        if self._listener is not None:
            if self._accept_at == inf:
                self._selector.unregister(self._listener)
            self._accept_at = inf
            close_listener(self._listener)
            self._listener = None

    def _tick(self, now: float) -> None:
        """Do what is due, and find out when something will be due again."""
        if now >= self._accept_at and self._listener is not None:
            self._accept_at = inf
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._due = self._accept_at
        for link in list(self._links.values()):
            self._guard(link, partial(link.tick, now))
            self.flush(link)

    # --- the beginning of a connection ---

    def expect(self, peer: int) -> None:
        """Note a connection that :meth:`dial` will begin, unless it is closed before that."""
        self._expected.add(peer)

    def dial(self, peer: int, addresses: list[SocketAddress]) -> None:
        """Connect to the first of the addresses that can be reached."""
        if peer in self._expected:
            self._expected.remove(peer)
            link = self._add(peer, LinkSide.CONNECTING)
            link.addresses = addresses
            self._guard(link, link.dial)
            self.flush(link)

    def _accept(self) -> None:
        """Take a new connection."""
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # it has ended meanwhile
        except OSError as error:  # no descriptor is free, and the connection would be reported again at once
            text = "no connection of another worker is accepted for %g s (%s); raise the limit of open files"
            logger.warning(text, ACCEPT_AGAIN_S, error.strerror)
            self._selector.unregister(self._listener)
            self._accept_at = time.monotonic() + ACCEPT_AGAIN_S
            self._due = min(self._due, self._accept_at)
            return
        sock.setblocking(False)
        self._make_room()
        link = self._add(next(self._numbers), LinkSide.ACCEPTING)
        self._guard(link, partial(link.start, sock))
        if len(self._links) > MAX_LINKS:
            text = f"there are {MAX_LINKS} connections to other workers, which is the limit; close some first"
            self._end(link, KVLinkError(text))
        self.flush(link)

    def _make_room(self) -> None:
        """Close the oldest of the accepted connections that are not open, if there are too many of these."""
        accepted = [link for link in self._links.values() if link.side is LinkSide.ACCEPTING]
        half_open = [link for link in accepted if link.phase is not LinkPhase.OPEN]
        if len(half_open) >= MAX_HALF_OPEN:
            text = f"{MAX_HALF_OPEN} newer connections wait for the handshake, which is the limit"
            self._end(half_open[0], KVLinkLostError(text))

    def _add(self, peer: int, side: LinkSide) -> Link:
        link = self._links[peer] = Link(peer, side, self._settings, time.monotonic())
        return link

    # --- while it lives ---

    def _serve(self, link: Link) -> None:
        """Read and write what a link's socket allows now."""
        if link.phase is LinkPhase.CONNECTING:
            self._guard(link, partial(self._check_connected, link))
        elif link.phase is not LinkPhase.CLOSED:
            self._guard(link, partial(self._receive, link))
        self.flush(link)

    def _check_connected(self, link: Link) -> None:
        assert link.sock is not None
        self._selector.unregister(link.sock)  # another socket may take its place
        link.check_connected()

    def _receive(self, link: Link) -> None:
        assert link.sock is not None
        try:
            count = link.sock.recv_into(self._chunk)
        except BlockingIOError:
            return
        for event in link.receive(self._chunk[:count], time.monotonic()):
            if isinstance(event, LinkOpened):
                self.open[link.peer] = link
            self._on_event(event)

    def flush(self, link: Link) -> None:
        """Write what the socket takes, and have the selector watch for what the link waits for."""
        if link.phase is not LinkPhase.CLOSED:
            self._guard(link, partial(link.write, time.monotonic()))
        if link.phase is not LinkPhase.CLOSED and link.sock is not None:
            self._watch(link, link.sock)
            self._due = min(self._due, link.deadline)

    def _watch(self, link: Link, sock: socket.socket) -> None:
        events = 0 if link.phase is LinkPhase.CONNECTING else selectors.EVENT_READ
        events |= selectors.EVENT_WRITE if link.has_output else 0
        known = self._selector.get_map().get(sock.fileno())
        if known is None:
            self._selector.register(sock, events, partial(self._serve, link))
        elif known.events != events:
            self._selector.modify(sock, events, known.data)

    def _guard(self, link: Link, action: Callable[[], None]) -> None:
        """Do something with a link; an error ends that link alone."""
        try:
            action()
        except KVLinkError as error:
            self._end(link, error)
        except OSError as error:
            reason = error.strerror or str(error)
            self._end(link, KVLinkLostError(f"the connection failed: {reason}; see whether that worker runs"))

    # --- its end ---

    def disconnect(self, peer: int, reason: str) -> None:
        """Close a connection, or give up the attempt; does nothing if there is none of this number."""
        error = KVLinkError(f"this side closed the connection: {reason}")
        link = self._links.get(peer)
        if link is None:
            self.forget(peer, error)
        elif link.phase is not LinkPhase.CLOSING:
            self._end(link, error, bye=reason)

    def forget(self, peer: int, error: KVLinkError) -> None:
        """Give up a connection whose address is being looked up."""
        if peer in self._expected:
            self._expected.remove(peer)
            self._on_event(_closed(peer, error))

    def _end(self, link: Link, error: KVLinkError, bye: str | None = None) -> None:
        """Report a link's end, and close it.

        Unless it would not read it, the other side first gets the reason: ``bye``, or the text of the error.
        """
        if link.phase is LinkPhase.CLOSED:
            return
        if link.phase is not LinkPhase.CLOSING:
            self._report(link, error)
            is_deaf = isinstance(error, KVLinkLostError | KVRefusedError)
            if link.phase is not LinkPhase.CONNECTING and not is_deaf:
                link.begin_closing(bye or error.message, time.monotonic())
                self.flush(link)
                return
        if link.sock is not None and link.sock.fileno() in self._selector.get_map():
            self._selector.unregister(link.sock)
        link.close()
        del self._links[link.peer]

    def _report(self, link: Link, error: KVLinkError) -> None:
        """Tell the owner, if it knows the peer; an accepted connection that never opened is only logged."""
        was_open = self.open.pop(link.peer, None) is not None
        if was_open or link.side is LinkSide.CONNECTING:
            self._on_event(_closed(link.peer, error))
        else:  # something that only connects and leaves, such as a health check, is nothing to warn of
            now, level = time.monotonic(), logging.DEBUG
            if not isinstance(error, KVLinkLostError) and now >= self._warn_at:
                level, self._warn_at = logging.WARNING, now + WARN_AGAIN_S
            logger.log(level, "a connection to %s was not opened: %s", self.address, error.message)


def _closed(peer: int, error: KVLinkError) -> LinkClosed:
    return LinkClosed(peer, cast(LinkCloseCode, error.code), error.message)
