"""The client of the memory service: blocking calls, for the threads of a worker and for tools."""

from __future__ import annotations

import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, TypeVar

import msgspec

from segue.errors import MemoryServiceError, WeightsMismatchError
from segue.gms import messages as wire
from segue.gms.lock_state import AskMode
from segue.gms.manifest import WeightsManifest, decode_manifest, encode_manifest
from segue.gms.transport import GmsFrameError, close, connect, packed, receive, send, unpacked
from segue.memory import shared

REPLY_S = 60.0  # `GmsTarget.reply_s`
TAKEOVER_REPLY_S = 2.0  # the same for a call of an engine that takes over: it can do without the service
KV_BYTES_PER_S = 1 << 30  # at which the service takes KV memory, at least
ReplyKind = TypeVar("ReplyKind", bound=wire.Message)
PartKind = TypeVar("PartKind", wire.SlabsGiven, wire.KVGranted)


@dataclass(frozen=True, slots=True, kw_only=True)
class GmsTarget:
    """Which service a client talks to, and as whom."""

    directory: str
    tag: wire.Tag = "weights"
    cohort: str = "default"
    engine: str = "-"
    rank: int = 0
    size: int = 1
    device: str = "cpu"
    token: str | None = None
    epoch: int = 0  # with which the engine serves
    connect_s: float = 60.0  # how long a service is waited for
    reply_s: float = REPLY_S  # the longest time that a call takes which does not wait for something
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(16))


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGrant:
    """KV memory that this process alone may write to. Whoever gets it closes the descriptors."""

    sizes: list[int]  # bytes of each slab
    descriptors: list[int]  # of the slabs
    journal: int | None  # a descriptor too
    is_fresh: bool  # nobody has prepared it before; on a device its contents are undefined then


class GmsClient:
    """A session with the service. One call at a time: other threads wait for it.

    Every method raises MemoryServiceError if the service cannot be reached or refuses the call; `code` says
    why, and is "lost" if the connection has ended.
    """

    def __init__(self, target: GmsTarget, pins: Sequence[int] = (), *, lineage: str = "") -> None:
        """Connect; `pins` are the generations that this process read in an earlier session.

        `lineage` is that of the service which has numbered them; "": they are numbers of this one.
        """
        self.target = target
        self._lineage = lineage
        self.notices: deque[wire.Notice] = deque()  # until somebody listens
        self._on_notice: Callable[[wire.Notice], None] = self.notices.append
        self._calls = 0
        self._lock = threading.Lock()
        self._is_closed = False
        self._socket: socket.socket
        self.opened = self._open(pins)

    def reopen(self, pins: Sequence[int], epoch: int = 0) -> None:
        """Connect again after the connection has ended; `pins` are the generations that are still read.

        `epoch` is that with which the engine serves; 0: it does not.
        Other threads may use the client meanwhile: their calls fail with the code "lost".
        """
        target = replace(self.target, connect_s=0.0, epoch=epoch)
        opened = GmsClient(target, pins, lineage=self.opened.lineage)
        with self._lock:
            if self._is_closed:
                opened.close()
                raise self._lost("the client is closed")
            self._socket.close()
            self._socket = opened._socket
            self.opened = opened.opened

    def epoch(self) -> int:
        """Return the highest epoch that the service knows of the cohort now.

        That of ``opened`` may be too low: engines that offer what they read tell the service theirs.
        """
        with GmsClient(replace(self.target, tag="watch", connect_s=0.0)) as now:
            return now.opened.epoch

    def _open(self, pins: Sequence[int]) -> wire.SessionOpened:
        """Connect and shake hands; a service that is not there yet is waited for."""
        target, deadline = self.target, time.monotonic() + self.target.connect_s
        while True:
            try:
                self._socket = connect(target.directory, target.reply_s)
                break
            except MemoryServiceError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.05)
        hello = wire.OpenSession(
            call=self._next(),
            protocol=wire.PROTOCOL,
            tag=target.tag,
            cohort=target.cohort,
            engine=target.engine,
            rank=target.rank,
            size=target.size,
            device=target.device,
            epoch=target.epoch,
            nonce=target.nonce,
            token=target.token,
            pins=list(pins),
            lineage=self._lineage,
        )
        try:
            return self._one(hello, wire.SessionOpened)
        except BaseException:
            self._socket.close()
            raise

    # Weights.

    def ask(
        self,
        manifest: WeightsManifest,
        mode: AskMode = "rw_or_ro",
        *,
        wait_s: float = 3600.0,
        update_epoch: int | None = None,
        on_wait: Callable[[int], None] = lambda position: None,
    ) -> wire.WeightsGranted:
        """Ask for weights, as rank 0; with `update_epoch`, for a generation beside the current one.

        Args:
            manifest: what the engine wants, without digests.
            mode: to load, to read, or whichever is possible.
            wait_s: how long another engine's load is waited for.
            update_epoch: the engine's epoch.
            on_wait: called every five seconds of waiting.
        """
        message = wire.AskWeights(
            call=self._next(),
            mode=mode,
            is_update=update_epoch is not None,
            epoch=update_epoch or 0,
            wait_s=wait_s,
        )
        descriptor = packed(encode_manifest(manifest))
        try:
            return self._one(message, wire.WeightsGranted, [descriptor], wait_s=wait_s, on_wait=on_wait)
        finally:
            close([descriptor])

    def join(self, lease: int) -> wire.WeightsGranted:
        """Join the lease of rank 0."""
        return self._one(wire.JoinLease(call=self._next(), lease=lease), wire.WeightsGranted)

    def allocate(self, lease: int, sizes: Sequence[int], *, wait_s: float = 0.0) -> list[int]:
        """Return the descriptors of new slabs, which the caller closes."""
        message = wire.AllocateSlabs(call=self._next(), lease=lease, sizes=list(sizes), wait_s=wait_s)
        return self._slabs(message, wait_s=wait_s)[1]

    def export(self, generation: int, rank: int) -> tuple[list[int], list[int]]:
        """Return the sizes and descriptors of a committed generation's slabs; the caller closes these."""
        return self._slabs(wire.ExportSlabs(call=self._next(), generation=generation, rank=rank))

    def manifest(self, generation: int, rank: int) -> WeightsManifest:
        """Return the manifest of a rank of a committed generation."""
        message = wire.GetManifest(call=self._next(), generation=generation, rank=rank)
        return decode_manifest(self._file(message, wire.ManifestGiven))

    def seal(self, lease: int, manifest: WeightsManifest, places: Sequence[int] | None = None) -> list[int]:
        """Make the slabs final, which are unmapped; returns the ranks that have not done so yet.

        `places` are the numbers of the slabs that an update has taken, in this order; it shares the others.
        """
        descriptor = packed(encode_manifest(manifest))
        try:
            numbers = None if places is None else list(places)
            message = wire.SealRank(call=self._next(), lease=lease, places=numbers)
            return self._one(message, wire.RankSealed, [descriptor]).missing
        finally:
            close([descriptor])

    def commit(self, lease: int, weight_version: str = "", model_path: str | None = None) -> int:
        """Make the lease's generation the current one, as rank 0; returns its number."""
        message = wire.CommitLease(
            call=self._next(), lease=lease, weight_version=weight_version, model_path=model_path
        )
        return self._one(message, wire.GenerationNumber).generation

    def abort(self, lease: int, *, is_abandoned: bool = False) -> None:
        """Give a lease to write up; `is_abandoned`: this process may still write to its slabs."""
        message = wire.AbortLease(call=self._next(), lease=lease, is_abandoned=is_abandoned)
        self._one(message, wire.CallDone)

    def rename(self, generation: int, epoch: int, weight_version: str) -> None:
        """Give the current generation of the cohort another version."""
        message = wire.RenameGeneration(
            call=self._next(), generation=generation, epoch=epoch, weight_version=weight_version
        )
        self._one(message, wire.GenerationNumber)

    def progress(self, lease: int, num_bytes: int) -> None:
        """Report the bytes that were loaded; a rank must do so at least once per minute."""
        message = wire.ReportProgress(call=self._next(), lease=lease, num_bytes=num_bytes)
        self._one(message, wire.CallDone)

    def pin(self, generation: int) -> None:
        """Keep a committed generation."""
        self._one(wire.PinGeneration(call=self._next(), generation=generation), wire.GenerationNumber)

    def unpin(self, generation: int) -> None:
        """Give a generation up, which is unmapped."""
        self._one(wire.UnpinGeneration(call=self._next(), generation=generation), wire.GenerationNumber)

    def offer(
        self,
        generation: int,
        manifest: WeightsManifest,
        descriptors: Sequence[int],
        *,
        epoch: int,
        is_loaded: bool,
        weight_version: str = "",
        model_path: str | None = None,
    ) -> int:
        """Offer what this rank reads to a service that has lost it; returns the number that it has now.

        The number is 0 until all ranks of the engine have offered theirs: then this must be called again. The
        refusal "other" means that the cohort has other weights, which are newer.
        """
        packed_manifest = packed(encode_manifest(manifest))
        step, number = wire.MAX_DESCRIPTORS - 1, 0
        try:
            for first in range(0, max(len(descriptors), 1), step):
                message = wire.OfferRank(
                    call=self._next(),
                    generation=generation,
                    first=first,
                    epoch=epoch,
                    is_loaded=is_loaded,
                    weight_version=weight_version,
                    model_path=model_path,
                )
                sent = [packed_manifest, *descriptors[first : first + step]]
                number = self._one(message, wire.GenerationNumber, sent).generation
        finally:
            close([packed_manifest])
        return number

    # KV memory.

    def ask_kv(
        self,
        epoch: int,
        pool_bytes: int,
        *,
        slab_bytes: int,
        journal_bytes: int = 0,
        wait_s: float = 0.0,
        limit_s: float = inf,
    ) -> KVGrant:
        """Return the KV memory of this rank, in slabs of `slab_bytes`, of which the last one has the rest.

        Args:
            epoch: that the engine has claimed.
            pool_bytes: a multiple of the device's granularity, as are those of the slabs.
            slab_bytes: of each slab but the last one.
            journal_bytes: of a journal in the host's memory, beside the pool; 0: none.
            wait_s: how long the end of the process that wrote before, and memory, are waited for.
            limit_s: how long the answer is waited for at most. Without one the ask is withdrawn, so that the
                service keeps nothing for this process, and fails with the code "late".
        """
        message = wire.AskKV(
            call=self._next(),
            epoch=epoch,
            pool_bytes=pool_bytes,
            slab_bytes=slab_bytes,
            journal_bytes=journal_bytes,
            wait_s=wait_s,
        )
        given: list[int] = []
        timeout_s = wait_s + TAKEOVER_REPLY_S + (pool_bytes + journal_bytes) / KV_BYTES_PER_S
        parts = self._parts(message, wire.KVGranted, given, min(timeout_s, limit_s), self._withdraw)
        sizes = [size for part in parts for size in part.sizes]
        if len(given) != len(sizes) + bool(journal_bytes):
            close(given)
            raise self._lost(f"{len(given)} descriptors for {len(sizes)} slabs")
        journal = given.pop() if journal_bytes else None
        return KVGrant(sizes=sizes, descriptors=given, journal=journal, is_fresh=parts[0].is_fresh)

    def kv_prepared(self) -> None:
        """Say that the fresh KV memory of this session is prepared; else it is fresh for the next engine."""
        self._one(wire.KVPrepared(call=self._next()), wire.CallDone, reply_s=TAKEOVER_REPLY_S)

    def withdraw_kv(self) -> None:
        """Say that this process uses no KV memory of the service, which frees what it has for it."""
        self._one(wire.WithdrawKV(call=self._next()), wire.CallDone, reply_s=TAKEOVER_REPLY_S)

    def _withdraw(self) -> MemoryServiceError:
        """Withdraw an ask for KV memory that has no answer in time; returns its error. Holds the lock.

        A grant that is on its way comes before the answer to this call. It is not used: the service takes it
        back. If there is no answer, the service reads the call later.
        """
        call, late = self._next(), list[int]()
        try:
            self._send(wire.WithdrawKV(call=call), ())
            self._reply(call, wire.CallDone, late, TAKEOVER_REPLY_S)
        finally:
            close(late)
        directory = self.target.directory
        error = MemoryServiceError(f"the memory service in {directory} has not granted KV memory in time")
        error.code = "late"
        return error

    def release_kv(self) -> None:
        """Give the KV memory of this session back, which this process has unmapped."""
        self._one(wire.ReleaseKV(call=self._next()), wire.CallDone, reply_s=TAKEOVER_REPLY_S)

    # Epochs, notes, and what people see.

    def claim(self, seen: int = 0) -> int:
        """Take the next epoch of the cohort, above `seen`."""
        message = wire.ClaimEpoch(call=self._next(), seen=seen)
        return self._one(message, wire.EpochClaimed, reply_s=TAKEOVER_REPLY_S).epoch

    def fence(self, below: int, *, kills: bool = False, wait_s: float = 0.0) -> wire.EnginesFenced:
        """Wait for the processes of engines that have served with an epoch below this one.

        With `kills` the service kills them, where the system allows it.
        """
        message = wire.FenceEngines(call=self._next(), below=below, kills=kills, wait_s=wait_s)
        return self._one(message, wire.EnginesFenced, wait_s=wait_s, reply_s=TAKEOVER_REPLY_S)

    def put_note(
        self, name: str, value: bytes, expect: bytes | None = None, *, keeps: bool = False
    ) -> bytes | None:
        """Set a note if it has the value `expect`; returns the value that it has then.

        With `keeps` the note, whoever has set it, stays until this session and all others that keep it end.
        """
        message = wire.PutNote(call=self._next(), name=name, value=value, expect=expect, keeps=keeps)
        return self._one(message, wire.NoteValue).value

    def note(self, name: str) -> bytes | None:
        """Return the value of a note."""
        return self._one(wire.GetNote(call=self._next(), name=name), wire.NoteValue).value

    def status(self) -> dict[str, Any]:
        """Return the state of the service, as `segue gms status --json` prints it."""
        found: dict[str, Any] = msgspec.json.decode(
            self._file(wire.GetServiceState(call=self._next()), wire.StateGiven)
        )
        return found

    def events(self, since: int = 0) -> list[wire.ServiceEvent]:
        """Return what has happened after event number `since`, as far as the service still has it."""
        return self._one(wire.GetServiceEvents(call=self._next(), since=since), wire.EventsGiven).events

    @property
    def is_lost(self) -> bool:
        """Whether the service has ended the connection."""
        return self._socket.fileno() < 0 or shared.is_closed(self._socket)

    def listen(self, on_notice: Callable[[wire.Notice], None]) -> None:
        """Have a function take all notices, those too that have come already; any thread may call it."""
        with self._lock:
            self._on_notice = on_notice
            while self.notices:
                on_notice(self.notices.popleft())

    def take_notices(self) -> bool:
        """Wait for notices, and take those that have come; returns False once the connection has ended.

        For a thread of its own. While another thread makes a call, that one takes the notices.
        """
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
        except ValueError:  # it is closed
            return False
        poll.poll()
        with self._lock:
            try:
                self._socket.settimeout(0)
                while True:
                    frame, descriptors = receive(self._socket)
                    close(descriptors)
                    reply = wire.decode_reply(frame) if frame else None
                    if not isinstance(reply, wire.Notice):
                        return False
                    self._on_notice(reply)
            except BlockingIOError:
                return True
            except (OSError, GmsFrameError, msgspec.MsgspecError):
                return False

    def close(self) -> None:
        """End the session: leases to write are dropped, and pins end."""
        self._is_closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # which ends a wait for notices
        self._socket.close()

    def __enter__(self) -> GmsClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Frames.

    def _next(self) -> int:
        self._calls += 1
        return self._calls

    def _file(self, message: wire.Message, kind: type[wire.Message]) -> bytes:
        descriptors: list[int] = []
        self._one(message, kind, given=descriptors)
        try:
            return unpacked(descriptors[0])
        except (GmsFrameError, IndexError) as error:
            raise MemoryServiceError(f"the memory service has sent no readable file ({error})") from error
        finally:
            close(descriptors)

    def _slabs(self, message: wire.Message, wait_s: float = 0.0) -> tuple[list[int], list[int]]:
        descriptors: list[int] = []
        parts = self._parts(message, wire.SlabsGiven, descriptors, wait_s + self.target.reply_s)
        return [size for part in parts for size in part.sizes], descriptors

    def _parts(
        self,
        message: wire.Message,
        kind: type[PartKind],
        given: list[int],
        timeout_s: float,
        give_up: Callable[[], MemoryServiceError] | None = None,
    ) -> list[PartKind]:
        """Make a call whose reply may come in several parts; their descriptors are appended to `given`.

        `give_up` ends the call if it takes longer than `timeout_s`, and returns its error; None: the
        connection is of no use any more.
        """
        parts: list[PartKind] = []
        try:
            with self._lock:
                self._send(message, ())
                while not parts or parts[-1].more:
                    parts.append(self._reply(message.call, kind, given, timeout_s, give_up=give_up))
        except BaseException:
            close(given)
            raise
        return parts

    def _one(
        self,
        message: wire.Message,
        kind: type[ReplyKind],
        descriptors: Sequence[int] = (),
        *,
        wait_s: float = 0.0,
        reply_s: float | None = None,
        on_wait: Callable[[int], None] = lambda position: None,
        given: list[int] | None = None,
    ) -> ReplyKind:
        """Make a call with one reply; its descriptors are appended to `given`."""
        received: list[int] = []
        try:
            with self._lock:
                self._send(message, descriptors)
                timeout_s = wait_s + (self.target.reply_s if reply_s is None else reply_s)
                return self._reply(message.call, kind, received, timeout_s, on_wait)
        finally:
            if given is None:
                close(received)
            else:
                given += received

    def _send(self, message: wire.Message, descriptors: Sequence[int]) -> None:
        try:
            send(self._socket, wire.encode(message), descriptors)
        except OSError as error:
            raise self._last_words() or self._lost(error) from error

    def _last_words(self) -> MemoryServiceError | None:
        """Return why the service has ended the session, if it has said so."""
        try:
            while True:
                frame, descriptors = receive(self._socket)
                close(descriptors)
                reply = wire.decode_reply(frame)
                if isinstance(reply, wire.CallRefused):
                    return _error(reply)
        except (OSError, GmsFrameError, msgspec.MsgspecError):
            pass
        return None

    def _lost(self, error: object) -> MemoryServiceError:
        """Return the error of a connection that is of no use any more, and close it."""
        with suppress(OSError):  # else the service, and a thread that waits for notices, see no end
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        text = f"the connection to the memory service in {self.target.directory} has ended ({error})"
        lost = MemoryServiceError(f"{text}; see its log, and start it again if it does not run")
        lost.code = "lost"
        return lost

    def _reply(
        self,
        call: int,
        kind: type[ReplyKind],
        descriptors: list[int],
        timeout_s: float,
        on_wait: Callable[[int], None] = lambda position: None,
        give_up: Callable[[], MemoryServiceError] | None = None,
    ) -> ReplyKind:
        """Receive until a call's reply comes; notices are kept, and replies to earlier calls are dropped."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
                frame, received = receive(self._socket)
                descriptors += received
                if not frame:
                    raise ConnectionResetError("closed by the service")
                reply = wire.decode_reply(frame)
            except ConnectionError as error:
                raise self._last_words() or self._lost(error) from error
            except TimeoutError as error:
                raise (self._lost(error) if give_up is None else give_up()) from error
            except (OSError, GmsFrameError, msgspec.MsgspecError) as error:
                raise self._lost(error) from error
            if isinstance(reply, kind) and reply.call == call:
                return reply
            if 0 < reply.call < call:
                continue
            match reply:
                case wire.GenerationChanged() | wire.EpochChanged() | wire.LeaseLost():
                    self._on_notice(reply)
                case wire.StillWaiting():
                    on_wait(reply.position)
                case wire.CallRefused():
                    raise _error(reply)
                case _:
                    raise self._lost(f"unexpected message {type(reply).__name__}")


def _error(refusal: wire.CallRefused) -> MemoryServiceError:
    """Return the error of a refusal, with its code."""
    kind = WeightsMismatchError if refusal.code == "mismatch" else MemoryServiceError
    error = kind(f"memory service: {refusal.text}", param=refusal.field)
    error.code = refusal.code
    return error
