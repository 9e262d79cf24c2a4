"""What the memory service does for each message: steps of the lock, slabs, notes. It has no sockets."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from segue.errors import MemoryServiceError, SlabInUseError, SlabMemoryError
from segue.gms import fsm
from segue.gms import messages as wire
from segue.gms.lock_state import (
    AbortEvent,
    AskEvent,
    BeatEvent,
    ClaimEvent,
    Cohort,
    CommitEffect,
    DoneEffect,
    DropEffect,
    FlipEvent,
    GoneEvent,
    GrantEffect,
    JoinEvent,
    PinEvent,
    ReclaimEffect,
    RefuseEffect,
    ReleaseEffect,
    RenameEvent,
    SealEvent,
    TakeEvent,
    TickEvent,
    UnpinEvent,
    WeightsEffect,
    WeightsEvent,
    WeightsLease,
    WeightsState,
)
from segue.gms.manifest import WeightsManifest, decode_manifest, difference, key_of
from segue.gms.status import status_of
from segue.gms.store import RankSlabs, SlabStore
from segue.gms.transport import GmsFrameError, close, packed, unpacked
from segue.logs import logger

STILL_WAITING_S = 5.0
RETRY_MEMORY_S = 0.5
_REFUSALS = {
    "committed": "the cohort has weights already, which a stray load must not replace; ask to read them",
    "nothing": "the cohort has no weights that could be updated",
    "stale_epoch": "a newer engine of the cohort has taken over; this one must end",
    "timeout": "the weights were not there in time; see `segue gms status` for who loads them",
    "busy": "this session waits already, or has a lease",
    "lease": "this session has no such lease to write; the service may have been started again",
    "rank": "this rank is taken, is not of this lease, or may not do this",
    "behind": "another engine of the cohort has just changed the weights, and this one has not taken them "
    "over yet; retry the update",
    "generation": "there is no such committed generation, or it is not the cohort's current one",
    "slabs": "the manifest is not one of the rank's slabs",
}


class GmsPort(Protocol):
    """The connection of a session."""

    def send(self, reply: wire.Reply, descriptors: Sequence[int] = ()) -> None:
        """Send a message; one that the client does not take ends its session."""

    @property
    def is_closed(self) -> bool:
        """Whether the client has gone."""


class Keeper(Protocol):
    """Keeps copies of what must survive the service's process."""

    def save(self, service: MemoryService) -> None:
        """Keep what is committed now; does nothing if that is kept already."""


@dataclass(slots=True, kw_only=True)
class GmsSession:
    """A client that was admitted."""

    number: int
    pid: int
    hello: wire.OpenSession
    port: GmsPort
    ask_call: int = 0  # the call that waits for weights; 0: none
    manifest: WeightsManifest | None = None  # that it has asked with
    since: float = field(default_factory=time.monotonic)


class MemoryService:
    """The weights of all cohorts, and who uses them."""

    def __init__(self, store: SlabStore, keeper: Keeper | None = None) -> None:
        self.store = store
        self.keeper = keeper
        self.state = WeightsState()
        self.sessions: dict[int, GmsSession] = {}
        self.notes: dict[tuple[str, str], bytes] = {}  # by cohort and name
        self.incarnation = secrets.token_hex(8)
        self.events: deque[wire.ServiceEvent] = deque(maxlen=256)
        self.num_events = 0
        self._num_sessions = 0

    # Sessions.

    def open(self, port: GmsPort, pid: int, hello: wire.OpenSession) -> GmsSession:
        """Admit a client, which has been checked."""
        self._num_sessions += 1
        session = GmsSession(number=self._num_sessions, pid=pid, hello=hello, port=port)
        self.sessions[session.number] = session
        lost = [number for number in hello.pins if number not in self.state.generations]
        for number in set(hello.pins) - set(lost):
            self.state, _ = fsm.step(self.state, PinEvent(session=session.number, generation=number))
        cohort = self.state.cohorts.get(hello.cohort, Cohort())
        opened = wire.SessionOpened(
            call=hello.call,
            session=session.number,
            incarnation=self.incarnation,
            devices=list(self.store.vmms),
            current=cohort.current,
            epoch=cohort.epoch,
            lost_pins=lost,
        )
        port.send(opened)
        return session

    def gone(self, session: GmsSession, reason: str) -> None:
        """Forget a client."""
        if self.sessions.pop(session.number, None) is None:
            return
        if session.hello.tag != "watch":
            self.note_event("session_ended", f"{self.name(session.number, session)}: {reason}")
        self.step(GoneEvent(session=session.number))

    def tick(self) -> None:
        """Let time pass; called several times per second."""
        self.step(TickEvent())

    def report_waiting(self) -> None:
        """Tell those that wait that they still do; called every STILL_WAITING_S seconds."""
        for position, ask in enumerate(self.state.waiting):
            session = self.sessions[ask.session]
            session.port.send(wire.StillWaiting(call=session.ask_call, position=position))

    # Messages.

    async def handle(self, session: GmsSession, message: wire.Request, descriptors: list[int]) -> None:
        """Carry a message out; the descriptors are the caller's.

        Raises:
            GmsFrameError: the message may not be sent now, or has the wrong descriptors.
        """
        needed = 1 if isinstance(message, wire.AskWeights | wire.SealRank) else 0
        if len(descriptors) != needed:
            raise GmsFrameError(
                f"{type(message).__name__} has {len(descriptors)} descriptors; expected {needed}"
            )
        number, call, port = session.number, message.call, session.port
        match message:
            case wire.OpenSession():
                raise GmsFrameError("OpenSession came twice")
            case wire.AskWeights():
                self._ask(session, message, descriptors[0])
            case wire.JoinLease():
                self.step(JoinEvent(session=number, lease=message.lease, rank=session.hello.rank), call)
            case wire.AllocateSlabs():
                await self._allocate(session, message)
            case wire.ExportSlabs():
                self._export(session, message)
            case wire.GetManifest():
                self._give_manifest(session, message)
            case wire.SealRank():
                await self._seal(session, message, descriptors[0])
            case wire.CommitLease():
                flip = FlipEvent(
                    session=number,
                    lease=message.lease,
                    version=message.weight_version,
                    model_path=message.model_path,
                )
                self.step(flip, call)
            case wire.AbortLease():
                abort = AbortEvent(session=number, lease=message.lease, is_abandoned=message.is_abandoned)
                self.step(abort, call)
            case wire.RenameGeneration():
                rename = RenameEvent(
                    session=number,
                    cohort=session.hello.cohort,
                    generation=message.generation,
                    epoch=message.epoch,
                    version=message.weight_version,
                )
                self.step(rename, call)
            case wire.ReportProgress():
                self.step(BeatEvent(session=number, lease=message.lease, num_bytes=message.num_bytes), call)
            case wire.PinGeneration():
                self.step(PinEvent(session=number, generation=message.generation), call)
            case wire.UnpinGeneration():
                self.step(UnpinEvent(session=number, generation=message.generation), call)
            case wire.ClaimEpoch():
                self.step(ClaimEvent(session=number, cohort=session.hello.cohort, seen=message.seen), call)
            case wire.PutNote():
                self._put_note(session, message)
            case wire.GetNote():
                value = self.notes.get((session.hello.cohort, message.name))
                port.send(wire.NoteValue(call=call, value=value))
            case wire.GetServiceState():
                self._send_file(session, wire.StateGiven(call=call), json.dumps(status_of(self)).encode())
            case wire.GetServiceEvents():
                found = [event for event in self.events if event.number > message.since]
                port.send(wire.EventsGiven(call=call, events=found))

    def _ask(self, session: GmsSession, message: wire.AskWeights, descriptor: int) -> None:
        if session.hello.rank != 0:
            raise GmsFrameError("only rank 0 asks for weights; the other ranks join its lease")
        if len(self.state.waiting) >= wire.MAX_WAITING:
            self._refuse(session, message.call, "limit", f"{wire.MAX_WAITING} sessions wait already")
            return
        manifest = self._manifest(descriptor)
        session.manifest = manifest
        ask = AskEvent(
            session=session.number,
            cohort=session.hello.cohort,
            size=session.hello.size,
            key=key_of(manifest.identity),
            mode=message.mode,
            is_update=message.is_update,
            epoch=message.epoch,
            deadline=time.monotonic() + message.wait_s,
        )
        self.step(ask, message.call)

    def _manifest(self, descriptor: int) -> WeightsManifest:
        try:
            return decode_manifest(unpacked(descriptor))
        except msgspec.MsgspecError as error:
            raise GmsFrameError(f"a manifest cannot be read ({error})") from None

    async def _allocate(self, session: GmsSession, message: wire.AllocateSlabs) -> None:
        if (found := self._writing(session, message)) is None:
            return
        lease, rank = found
        deadline = time.monotonic() + message.wait_s
        while True:
            try:
                made = await self.store.create(session.hello.device, message.sizes)
                break
            except MemoryServiceError as error:
                self._refuse(session, message.call, "slabs", error.message)
                return
            except SlabMemoryError as error:
                self.note_event("out_of_memory", f"{session.hello.device}: {error.message}")
                if time.monotonic() >= deadline or session.port.is_closed:
                    self._refuse(session, message.call, "memory", error.message)
                    return
                await asyncio.sleep(RETRY_MEMORY_S)
        self.step(TakeEvent(session=session.number, lease=message.lease, slabs=tuple(made)), message.call)
        now = self.state.leases.get(message.lease)
        if now is None or not set(made) <= set(now.ranks[rank].own):  # another rank has ended it meanwhile
            self.store.free(made)
            return
        slabs = self.store.ranks.setdefault((lease.generation, rank), RankSlabs(device=session.hello.device))
        slabs.sizes += message.sizes
        slabs.descriptors += made
        self._give(session, message.call, message.sizes, made)

    def _export(self, session: GmsSession, message: wire.ExportSlabs) -> None:
        slabs = self._committed(session, message)
        if slabs is not None:
            self._give(session, message.call, slabs.sizes, slabs.descriptors)

    def _give_manifest(self, session: GmsSession, message: wire.GetManifest) -> None:
        slabs = self._committed(session, message)
        if slabs is not None:
            self._send_file(session, wire.ManifestGiven(call=message.call), slabs.manifest)

    def _committed(
        self, session: GmsSession, message: wire.ExportSlabs | wire.GetManifest
    ) -> RankSlabs | None:
        """Return a rank's slabs that a session pins, or refuse the call."""
        if (session.number, message.generation) in self.state.pins:
            found = self.store.ranks.get((message.generation, message.rank))
            if found is not None:
                return found
        self._refuse(session, message.call, "generation", "the session does not pin this generation and rank")
        return None

    def _give(self, session: GmsSession, call: int, sizes: Sequence[int], descriptors: Sequence[int]) -> None:
        """Send the descriptors of slabs, in as many messages as they need."""
        step, total = wire.MAX_DESCRIPTORS, len(sizes)
        for first in range(0, max(total, 1), step):
            part = slice(first, first + step)
            given = wire.SlabsGiven(call=call, sizes=list(sizes[part]), more=first + step < total)
            session.port.send(given, descriptors[part])

    async def _seal(self, session: GmsSession, message: wire.SealRank, descriptor: int) -> None:
        if (found := self._writing(session, message)) is None:
            return
        lease, rank = found
        manifest = self._manifest(descriptor)
        slabs = self._merged(lease, rank, manifest, message.places)
        if slabs is None:
            self._refuse(session, message.call, "slabs", _REFUSALS["slabs"])
            return
        try:
            await self.store.seal(session.hello.device, lease.ranks[rank].own)
        except SlabInUseError as error:
            self._refuse(session, message.call, "in_use", error.message)
            abandon = AbortEvent(session=session.number, lease=message.lease, is_abandoned=True)
            self.step(abandon, call=None)  # the call is answered
            return
        event = SealEvent(session=session.number, lease=message.lease, slabs=tuple(slabs.descriptors))
        self.step(event, message.call)
        now = self.state.leases.get(message.lease)
        if now is not None and now.ranks[rank].is_sealed:
            self.store.ranks[lease.generation, rank] = slabs

    def _merged(
        self, lease: WeightsLease, rank: int, manifest: WeightsManifest, places: Sequence[int] | None
    ) -> RankSlabs | None:
        """Return all slabs of a rank: its own, and those of its parent; None: they do not fit."""
        own, sizes = lease.ranks[rank].own, manifest.identity.slab_sizes
        slabs = [-1] * len(sizes)
        if lease.parent is not None:
            slabs = list(self.store.ranks[lease.parent, rank].descriptors)
        places = range(len(own)) if places is None else places
        if len(set(places)) != len(own) or not set(places) <= set(range(len(slabs))):
            return None
        for place, slab in zip(places, own, strict=True):
            slabs[place] = slab
        if -1 in slabs or [self.store.size_of(slab) for slab in slabs] != sizes:
            return None
        if len(manifest.digests) != len(sizes):
            return None
        return RankSlabs(
            device=self.store.device_of(slabs[0]),
            sizes=sizes,
            descriptors=slabs,
            manifest=msgspec.msgpack.encode(manifest),
        )

    def _writing(
        self, session: GmsSession, message: wire.AllocateSlabs | wire.SealRank
    ) -> tuple[WeightsLease, int] | None:
        """Return a lease that a session may write, and its rank in it, or refuse the call."""
        lease = self.state.leases.get(message.lease)
        rank = None if lease is None or not lease.is_rw else lease.rank_of(session.number)
        if lease is None or rank is None:
            self._refuse(session, message.call, "lease", _REFUSALS["lease"])
            return None
        return lease, rank

    def _put_note(self, session: GmsSession, message: wire.PutNote) -> None:
        key = (session.hello.cohort, message.name)
        value = self.notes.get(key)
        if value == message.expect:
            if value is None and len(self.notes) >= wire.MAX_NOTES:
                self._refuse(session, message.call, "limit", f"there are {wire.MAX_NOTES} notes already")
                return
            self.notes[key] = value = message.value
            self._save()
        session.port.send(wire.NoteValue(call=message.call, value=value))

    def _send_file(self, session: GmsSession, reply: wire.Reply, data: bytes) -> None:
        descriptor = packed(data)
        session.port.send(reply, [descriptor])
        close([descriptor])

    def _refuse(self, session: GmsSession, call: int, code: str, text: str) -> None:
        session.port.send(wire.CallRefused(call=call, code=code, text=text))

    # The lock.

    def step(self, event: WeightsEvent, call: int | None = None) -> None:
        """Take a step of the lock, and carry its effects out.

        `call` is the session's call that the event is; None: there is none, or it is answered already.
        """
        own = None if isinstance(event, TickEvent | GoneEvent) else event.session
        is_claim = isinstance(event, ClaimEvent)
        self.state, effects = fsm.step(self.state, event, time.monotonic())
        if any(isinstance(effect, CommitEffect | ReclaimEffect) for effect in effects) or is_claim:
            self._save()  # before anybody is told
        for effect in effects:
            if isinstance(effect, GrantEffect | RefuseEffect | DoneEffect):
                session = self.sessions.get(effect.session)
                if session is None:
                    continue
                if effect.session == own:
                    own, answered = None, call
                else:
                    answered, session.ask_call = session.ask_call, 0
                if answered is not None:
                    self._answer(effect, answered, event, session)
            else:
                self._carry_out(effect)
        if own is not None and isinstance(event, AskEvent):  # it was not answered: it waits
            self.sessions[own].ask_call = call or 0
            self.note_event("waits", f"{self.name(own)} for weights")

    def _answer(
        self,
        effect: GrantEffect | RefuseEffect | DoneEffect,
        call: int,
        event: WeightsEvent,
        session: GmsSession,
    ) -> None:
        if isinstance(event, TakeEvent) and isinstance(effect, DoneEffect):
            return  # `_allocate` sends the slabs
        session.port.send(self._reply(effect, call, event, session))

    def _reply(
        self,
        effect: GrantEffect | RefuseEffect | DoneEffect,
        call: int,
        event: WeightsEvent,
        session: GmsSession,
    ) -> wire.Reply:
        match effect:
            case GrantEffect():
                text = f"generation {effect.generation} to {self.name(effect.session)}"
                self.note_event(f"{effect.mode}_granted", text)
                found = self.state.generations.get(effect.generation)
                return wire.WeightsGranted(
                    call=call,
                    lease=effect.lease,
                    generation=effect.generation,
                    mode=effect.mode,
                    parent=effect.parent,
                    weight_version="" if found is None else found.version,
                    model_path=None if found is None else found.model_path,
                )
            case RefuseEffect():
                return self._refusal(effect, call, session)
            case DoneEffect():
                if isinstance(event, SealEvent):
                    self.note_event("sealed", f"generation {effect.number} by {self.name(effect.session)}")
                    return wire.RankSealed(call=call, missing=list(effect.missing))
                if isinstance(event, ClaimEvent):
                    self.note_event("epoch_claimed", f"{effect.number} by {self.name(effect.session)}")
                    return wire.EpochClaimed(call=call, epoch=effect.number)
                if isinstance(event, AbortEvent | BeatEvent):
                    return wire.CallDone(call=call)
                return wire.GenerationNumber(call=call, generation=effect.number)

    def _refusal(self, effect: RefuseEffect, call: int, session: GmsSession) -> wire.CallRefused:
        text, field, have, want = _REFUSALS.get(effect.code, ""), None, None, None
        if effect.code == "unsealed":
            text = f"ranks {', '.join(map(str, effect.ranks))} have not sealed their slabs"
        elif effect.code == "pinned":
            names = ", ".join(self.name(number) for number in effect.sessions)
            text = f"generation {effect.generation}, which is retired, is still read by {names}"
        elif effect.code == "mismatch" and effect.generation is not None and session.manifest is not None:
            served = decode_manifest(self.store.ranks[effect.generation, 0].manifest)
            found = difference(served.identity, session.manifest.identity)
            if found is not None:
                field, have, want = found.field, found.have, found.want
            text = (
                f"cohort {session.hello.cohort!r} has other weights: {field} is {have}, and this engine has "
                f"{want}; use the same model and options, or another --cohort"
            )
        self.note_event("refused", f"{effect.code}: {self.name(session.number)}: {text}")
        return wire.CallRefused(call=call, code=effect.code, text=text, field=field, have=have, want=want)

    def _carry_out(self, effect: WeightsEffect) -> None:
        match effect:
            case CommitEffect():
                found = self.state.generations[effect.generation]
                text = f"generation {effect.generation} of cohort {effect.cohort!r}"
                self.note_event("committed", f"{text}, version {found.version!r}")
                notice = wire.GenerationChanged(
                    generation=effect.generation,
                    weight_version=found.version,
                    model_path=found.model_path,
                )
                self._notify(effect.readers, notice)
            case DropEffect():
                num_bytes = self.store.drop(effect.generation, effect.slabs)
                text = f"generation {effect.generation} ({effect.reason}), {num_bytes} bytes"
                self.note_event("dropped", text)
                self._notify(effect.sessions, wire.LeaseLost(lease=effect.lease, reason=effect.reason))
            case ReclaimEffect():
                num_bytes = self.store.drop(effect.generation, effect.slabs)
                self.note_event("reclaimed", f"generation {effect.generation}, {num_bytes} bytes")
            case ReleaseEffect():
                num_bytes = self.store.free(effect.slabs)
                self.note_event("released", f"{num_bytes} bytes that an ended process might have written to")
            case _:
                raise AssertionError(effect)

    def _notify(self, sessions: Sequence[int], notice: wire.Reply) -> None:
        for number in sessions:
            if (session := self.sessions.get(number)) is not None:
                session.port.send(notice)

    def _save(self) -> None:
        if self.keeper is not None:
            self.keeper.save(self)

    # What people see.

    def name(self, number: int, session: GmsSession | None = None) -> str:
        """Return what an engine's session is called in messages."""
        session = session or self.sessions.get(number)
        if session is None:
            return f"session {number}"
        hello = session.hello
        return f"{hello.cohort}/{hello.engine} rank {hello.rank} (pid {session.pid})"

    def note_event(self, kind: str, text: str) -> None:
        """Add an event to the ring."""
        self.num_events += 1
        self.events.append(wire.ServiceEvent(number=self.num_events, at=time.time(), kind=kind, text=text))
        logger.debug("%s: %s", kind, text)
