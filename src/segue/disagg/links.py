"""All connections of a worker to other workers, for their owner, which is another thread."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from functools import partial

from segue.disagg import frames
from segue.disagg.addresses import address_of, listen, parse, resolve
from segue.disagg.link import LinkSettings
from segue.disagg.link_loop import LinkLoop
from segue.errors import KVLinkError
from segue.messages.kv import Hello, KVMessage, Pong
from segue.messages.kv_link import LinkEvent


class Links:
    """The connections of one worker.

    One thread serves them. It answers pings itself, so a worker answers while its engine computes; whether
    the engine makes progress is told by the contents of ``Ping`` and ``Pong``, which the owner judges.

    Args:
        listen_address: as in :meth:`listen`; None: no connections are accepted before a call of it.
        hello: returns what this worker says of itself at the beginning of a connection. The thread calls it;
            the nonce is drawn anew each time, whatever it is here.
        key: ``--pd-key``; without one only loopback and unix addresses can be connected.
        on_event: gets what happens, in order. The thread calls it, so it must not block or raise.
        silence_s: seconds without a byte from a peer until it is pinged. After three more of them, each with
            a ping that is not answered, the peer is lost.
        handshake_s: seconds that connecting and the handshake may take together.

    Raises:
        ConfigError: the address is malformed, in use, or not one of this machine.
    """

    def __init__(
        self,
        listen_address: str | None,
        hello: Callable[[], Hello],
        key: bytes | None,
        on_event: Callable[[LinkEvent], None],
        *,
        silence_s: float = 1.0,
        handshake_s: float = 5.0,
    ) -> None:
        self._load = Pong(step=0, busy=False)
        settings = LinkSettings(
            hello=hello,
            key=key,
            load=lambda: self._load,
            silence_s=silence_s,
            handshake_s=handshake_s,
        )
        self._numbers = itertools.count(1)
        listener = None if listen_address is None else listen(listen_address)
        self._loop = LinkLoop(listener, settings, on_event, self._numbers)
        # Where others reach this worker, with the port that 0 has become; None: it accepts no connections.
        self.address = self._loop.address
        self._thread = threading.Thread(target=self._loop.run, name="segue-links", daemon=True)
        self._thread.start()

    def listen(self, address: str) -> str:
        """Accept connections at ``HOST:PORT``, ``[IPv6]:PORT`` or ``unix:PATH``; none may be accepted yet.

        Returns the address, with the port that 0 has become.

        Raises:
            ConfigError: the address is malformed, in use, or not one of this machine.
        """
        assert self.address is None
        listener = listen(address)
        self.address = address_of(listener)
        self._loop.calls.put(partial(self._loop.start_listening, listener))
        return self.address

    def stop_listening(self) -> None:
        """Accept no more connections; the address is free when this returns."""
        done = threading.Event()
        self._loop.calls.put(self._loop.stop_listening)
        self._loop.calls.put(done.set)
        done.wait()
        self.address = None

    def connect(self, address: str) -> int:
        """Begin to connect to a worker; returns the peer's number.

        ``LinkOpened`` or ``LinkClosed`` follows. The owner decides whether to try again.

        Raises:
            ConfigError: the address is malformed.
        """
        parse(address)
        peer = next(self._numbers)
        self._loop.calls.put(partial(self._loop.expect, peer))
        if found := resolve(address, numeric=True):
            self._loop.calls.put(partial(self._loop.dial, peer, found))
        else:  # the C library may look for a name for minutes
            lookup = threading.Thread(target=self._resolve, args=(peer, address), name="segue-lookup")
            lookup.daemon = True
            lookup.start()
        return peer

    def _resolve(self, peer: int, address: str) -> None:
        """Look up a host name, in a thread of its own."""
        try:
            self._loop.calls.put(partial(self._loop.dial, peer, resolve(address)))
        except KVLinkError as error:
            self._loop.calls.put(partial(self._loop.forget, peer, error))

    def send(self, peer: int, message: KVMessage) -> None:
        """Send a message, after all that were sent before; call this only after ``LinkOpened``.

        It is dropped if the connection has ended: ``LinkClosed`` says so, or is on its way.

        Raises:
            KVProtocolError: the message is over its limit.
        """
        frame = frames.encode(message)
        link = self._loop.open.get(peer)
        if link is not None and link.queue(frame):
            self._loop.calls.put(partial(self._loop.flush, link))

    def set_load(self, *, step: int, busy: bool) -> None:
        """Set what pings and their answers say of this worker: the fields of ``Pong``."""
        self._load = Pong(step=step, busy=busy)

    def disconnect(self, peer: int, reason: str) -> None:
        """Close a connection once what was sent before is written; the other side gets the reason.

        ``LinkClosed`` follows at once, and no message comes after it. A number that is not known is ignored.
        """
        self._loop.calls.put(partial(self._loop.disconnect, peer, reason))

    def close(self) -> None:
        """Close all connections like :meth:`disconnect`, and end the thread; this takes about 1 s at most.

        It may not be called from ``on_event``. No other method may be called afterwards.
        """
        self._loop.calls.put(self._loop.stop)
        self._thread.join()
