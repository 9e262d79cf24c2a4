"""KV pages between hosts, by NIXL: over RDMA or TCP, in the memory of the CPU or of a GPU.

This is the writer's side; the reader's is `segue.disagg.transports.nixl_export`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from queue import Empty, SimpleQueue

import msgspec

from segue.disagg.layout import HeadRoute, piece_span
from segue.disagg.transports.base import CONNECT_S, Done, Failed, PagePair, Peer
from segue.disagg.transports.cuda_ipc import SideStream
from segue.disagg.transports.export import shape_of
from segue.disagg.transports.nixl_agent import MAX_PAUSE_S, NixlAgent, PollPace, PoolBlob
from segue.disagg.transports.nixl_pushes import NixlPush, NixlPushes, NixlTarget
from segue.disagg.transports.nixl_remotes import OpenPools
from segue.disagg.transports.nixl_staging import Staging
from segue.disagg.transports.pieces import head_mover
from segue.disagg.transports.pusher import Pusher
from segue.errors import TransportError
from segue.kvcache.pool import KVPool

logger = logging.getLogger(__name__)

IDLE_S = 1.0  # between two looks at connections, which may end, while no pages are under way
CLOSE_S = 10.0  # how long the end waits for what is under way; a peer that hangs would hold it up for ever


class NixlTransport(Pusher[NixlTarget]):
    """Pushes pages of this rank's KV pool to pools that other ranks export (`Transport`).

    One thread waits for the steps that compute pages, and another one calls NIXL. It sleeps unless pages are
    under way.
    """

    def __init__(self, pool: KVPool, on_ready: Callable[[], None]) -> None:
        """Register this rank's pool, and start the threads.

        `on_ready` is called from a thread when a push has ended; it must neither block nor raise.

        Raises:
            ConfigError: NIXL is not installed, or does not start.
        """
        super().__init__(pool.num_pages, on_ready)
        self._shape = shape_of(pool)
        self._side = SideStream(pool.data.device) if pool.data.is_cuda else None
        self._steps: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None: end the thread
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # what the thread that calls NIXL alone uses
        self._heads = head_mover(pool)
        self._ends_at: float | None = None  # None: it goes on
        started: Future[None] = Future()
        self._threads = [
            threading.Thread(target=self._await_steps, name="segue-kv-steps", daemon=True),
            threading.Thread(target=self._run, args=(pool, started), name="segue-kv-nixl", daemon=True),
        ]
        self._threads[1].start()
        started.result()
        self._threads[0].start()

    def connect(self, path: str, blob: bytes, route: HeadRoute, session: str, opened_at: float) -> Peer:
        """Open an exported pool, to which the heads of `route` will be pushed. Only it and `blob` are used.

        Unless these are all heads of the pool's pages, they arrive as a piece (`segue.disagg.layout`), which
        the reader has to put in order.

        Raises:
            TransportError: the blob cannot be read, its pages have another shape, NIXL refuses, or there is
                no memory to gather pieces in.
        """
        try:
            export = msgspec.msgpack.decode(blob, type=PoolBlob)
        except msgspec.DecodeError as error:
            raise TransportError(
                f"the offer of a KV pool by NIXL cannot be read ({error}); both workers must run the same "
                "version of Segue"
            ) from error
        route.check(self._shape, export.shape)
        answer: Future[NixlTarget] = Future()
        self._jobs.put(partial(self._open, export, route, answer))
        try:
            target = answer.result(CONNECT_S)
        except FutureTimeoutError as error:
            if answer.cancel():
                text = f"NIXL has not opened a decode worker's KV pool within {CONNECT_S:g} s"
                raise TransportError(f"{text}; see whether that worker runs") from error
            target = answer.result()
        return self._add(target)

    def push(self, peer: Peer, pages: Sequence[PagePair], after: Callable[[], None]) -> int:
        """Write pages to a peer once `after` returns; returns a ticket at once.

        Raises:
            PageRangeError: one of the pools has no such page, or it is the scratch page.
            TransportError: the peer is not connected.
        """
        ticket, target, sources, targets = self._begin(peer, pages)
        self._steps.put(partial(self._await_step, ticket, target, sources, targets, after))
        return ticket

    def disconnect(self, peer: Peer) -> None:
        """Give the peer up after all pushes to it; returns at once."""
        if (target := self._begin_leaving(peer)) is not None:
            self._jobs.put(partial(self._leave, target))

    def close(self) -> None:
        """Disconnect all peers, and wait until what is posted has ended, CLOSE_S seconds at most."""
        for peer in self._close():
            self.disconnect(peer)
        self._steps.put(None)
        self._threads[0].join()
        self._jobs.put(self._end)
        self._threads[1].join()

    # --- the thread that waits for steps ---

    def _await_steps(self) -> None:
        while (job := self._steps.get()) is not None:
            job()

    def _await_step(
        self,
        ticket: int,
        target: NixlTarget,
        sources: list[int],
        targets: list[int],
        after: Callable[[], None],
    ) -> None:
        """Wait for one step, and hand its pages on. NIXL knows nothing of streams, so the thread waits."""
        try:
            if self._side is None:
                after()
            else:
                self._side.run(after, lambda stream: None)
        except Exception as error:
            logger.exception("a push of %d KV pages failed", len(sources))
            failure = TransportError(f"the push failed: {error!r}")
            self._jobs.put(partial(self._note_end, Failed(ticket=ticket, error=failure), target))
        else:
            push = NixlPush(ticket=ticket, target=target, sources=sources, targets=targets)
            self._jobs.put(partial(self._pushes.begin, push))

    # --- the thread that calls NIXL ---

    def _run(self, pool: KVPool, started: Future[None]) -> None:
        """The thread: do jobs, and while pages are under way look after them."""
        try:
            self._agent = NixlAgent(pool)
        except BaseException as error:
            started.set_exception(error)
            return
        self._remotes = OpenPools(self._agent)
        self._pushes = NixlPushes(self._agent, self._remotes)
        started.set_result(None)
        pace = PollPace(MAX_PAUSE_S)
        while self._ends_at is None or (self._pushes and time.monotonic() < self._ends_at):
            try:
                job = self._jobs.get(timeout=pace.pause_s if self._pushes else IDLE_S)
            except Empty:
                self._look_around()
            else:
                job()
                pace.quicken()
            pace.call(self._look_after_pushes)
        if self._pushes:
            logger.warning("%d pushes of KV pages have not ended within %g s", len(self._pushes), CLOSE_S)

    def _look_around(self) -> None:
        """Let NIXL note which connections have ended."""
        if not self._pushes:
            try:
                self._agent.work()
            except TransportError as error:
                logger.warning("%s", error.message)

    def _look_after_pushes(self) -> None:
        """Go on with the pushes, and report those that have ended."""
        for push in self._pushes.advance():
            done = Done(ticket=push.ticket)
            self._note_end(
                done if push.error is None else Failed(ticket=push.ticket, error=push.error), push.target
            )

    def _open(self, blob: PoolBlob, route: HeadRoute, answer: Future[NixlTarget]) -> None:
        """Open a pool for a peer, unless another peer has it already."""
        if not answer.set_running_or_notify_cancel():
            return
        try:
            answer.set_result(self._target(blob, route))
        except TransportError as error:
            answer.set_exception(error)

    def _target(self, blob: PoolBlob, route: HeadRoute) -> NixlTarget:
        remote, staging = self._remotes.join(blob, piece_span(route, blob.shape)), None
        if not route.has_whole_source(self._shape):
            try:
                staging = Staging(self._agent, self._heads, route, blob.shape, self._num_pages)
            except TransportError:
                self._remotes.leave(remote)
                raise
        return NixlTarget(num_pages=blob.num_pages, remote=remote, staging=staging)

    def _note_end(self, event: Done | Failed, target: NixlTarget) -> None:
        """Report the end of a push; after the last one to a peer that is to leave, the peer leaves."""
        super()._note_end(event, target)
        if target.is_leaving:
            self._leave(target)

    def _leave(self, target: NixlTarget) -> None:
        """Give a peer up, unless pushes to it are under way: the end of the last one calls this again."""
        with self._lock:
            if target.num_pushes or self._targets.pop(target.peer, None) is None:
                return
        staging, target.staging = target.staging, None  # others may hold the target for a while
        if staging is not None:
            try:
                staging.close()
            except TransportError as error:
                logger.warning("%s", error.message)
        self._remotes.leave(target.remote)

    def _end(self) -> None:
        self._ends_at = time.monotonic() + CLOSE_S
