"""What the memory service does for each message: steps of the lock, slabs, notes. It has no sockets."""

from __future__ import annotations

import json
import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from segue.gms import fsm
from segue.gms import messages as wire
from segue.gms.adoption import WeightOffers
from segue.gms.answers import answer
from segue.gms.fencing import ProcessFence
from segue.gms.kv_calls import KVLeases
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
    RefusalCode,
    RefuseEffect,
    ReleaseEffect,
    RenameEvent,
    TakeEvent,
    TickEvent,
    UnpinEvent,
    WeightsEffect,
    WeightsEvent,
    WeightsState,
)
from segue.gms.manifest import key_of
from segue.gms.session import GmsPort, GmsSession
from segue.gms.slab_calls import SlabCalls, read_manifest
from segue.gms.status import status_of
from segue.gms.store import SlabStore
from segue.gms.transport import GmsFrameError
from segue.logs import logger

STILL_WAITING_S = 5.0


class Keeper(Protocol):
    """Keeps copies of what must survive the service's process."""

    def save(self, service: MemoryService) -> None:
        """Keep what is committed now; does nothing if that is kept already."""


class MemoryService:
    """The weights and the KV memory of all cohorts, and who uses them."""

    def __init__(self, store: SlabStore, keeper: Keeper | None = None) -> None:
        self.store = store
        self.keeper = keeper
        self.state = WeightsState()
        self.sessions: dict[int, GmsSession] = {}
        self.notes: dict[tuple[str, str], bytes] = {}  # by cohort and name
        self.incarnation = secrets.token_hex(8)
        self.lineage = self.incarnation  # of the numbers of generations; the holder keeps it
        self.events: deque[wire.ServiceEvent] = deque(maxlen=256)
        self.num_events = 0
        self._num_sessions = 0
        self.note_keepers: dict[tuple[str, str], set[int]] = {}  # sessions; none: the note stays
        self._slabs = SlabCalls(self)
        self._offers = WeightOffers(self)
        self.fence = ProcessFence(self)
        self.kv = KVLeases(self)

    # Sessions.

    def open(self, port: GmsPort, pid: int, hello: wire.OpenSession) -> GmsSession:
        """Admit a client, which has been checked."""
        self._num_sessions += 1
        epoch = max([hello.epoch, *(each.epoch for each in self._sessions_of(hello))])
        session = GmsSession(number=self._num_sessions, pid=pid, hello=hello, port=port, epoch=epoch)
        self.sessions[session.number] = session
        known = self.state.generations if hello.lineage in ("", self.lineage) else ()
        lost = [number for number in hello.pins if number not in known]
        for number in set(hello.pins) - set(lost):
            self.state, _ = fsm.step(self.state, PinEvent(session=session.number, generation=number))
        cohort = self.state.cohorts.get(hello.cohort, Cohort())
        opened = wire.SessionOpened(
            call=hello.call,
            session=session.number,
            incarnation=self.incarnation,
            lineage=self.lineage,
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
            self.note_event("session_ended", f"{session.name}: {reason}")
        self._release_notes(session.number)
        self._offers.forget(session.number)
        self.fence.gone(session.number)
        self.kv.gone(session)
        self.step(GoneEvent(session=session.number))

    def tick(self) -> None:
        """Let time pass; called several times per second."""
        self.step(TickEvent())
        self.fence.tick()
        self.kv.tick()

    def close(self) -> None:
        """Carry nothing out any more."""
        self.fence.close()
        self.kv.close()

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
        if len(descriptors) != needed and not isinstance(message, wire.OfferRank):
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
                await self._slabs.allocate(session, message)
            case wire.ExportSlabs():
                self._slabs.export(session, message)
            case wire.GetManifest():
                self._slabs.give_manifest(session, message)
            case wire.SealRank():
                await self._slabs.seal(session, message, descriptors[0])
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
            case wire.OfferRank():
                self._offers.take(session, message, descriptors)
            case wire.AskKV():
                await self.kv.ask(session, message)
            case wire.KVPrepared():
                self.kv.prepared(session, call)
            case wire.WithdrawKV():
                self.kv.withdraw(session, call)
            case wire.ReleaseKV():
                self.kv.release(session, call)
            case wire.ClaimEpoch():
                self.step(ClaimEvent(session=number, cohort=session.hello.cohort, seen=message.seen), call)
                self._claimed(session, self.state.cohorts[session.hello.cohort].epoch)
            case wire.FenceEngines():
                self.fence.ask(session, message)
            case wire.PutNote():
                self._put_note(session, message)
            case wire.GetNote():
                value = self.notes.get((session.hello.cohort, message.name))
                port.send(wire.NoteValue(call=call, value=value))
            case wire.GetServiceState():
                session.send_file(wire.StateGiven(call=call), json.dumps(status_of(self)).encode())
            case wire.GetServiceEvents():
                found = [event for event in self.events if event.number > message.since]
                port.send(wire.EventsGiven(call=call, events=found))

    def refuse(self, session: GmsSession, call: int, code: RefusalCode) -> None:
        """Refuse a call as the lock does."""
        session.port.send(
            answer(self, RefuseEffect(session=session.number, code=code), call, TickEvent(), session)
        )

    def _ask(self, session: GmsSession, message: wire.AskWeights, descriptor: int) -> None:
        if session.hello.rank != 0:
            raise GmsFrameError("only rank 0 asks for weights; the other ranks join its lease")
        if len(self.state.waiting) >= wire.MAX_WAITING:
            session.refuse(message.call, "limit", f"{wire.MAX_WAITING} sessions wait already")
            return
        manifest = read_manifest(descriptor)
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

    def _put_note(self, session: GmsSession, message: wire.PutNote) -> None:
        key = (session.hello.cohort, message.name)
        value = self.notes.get(key)
        if value == message.expect:
            if value is None and len(self.notes) >= wire.MAX_NOTES:
                session.refuse(message.call, "limit", f"there are {wire.MAX_NOTES} notes already")
                return
            self.notes[key] = value = message.value
        if message.keeps:
            self.note_keepers.setdefault(key, set()).add(session.number)
        self._save()
        session.port.send(wire.NoteValue(call=message.call, value=value))

    def _claimed(self, session: GmsSession, epoch: int) -> None:
        """Note what an engine has claimed; tell the other engines of its cohort that this one serves."""
        for each in self._sessions_of(session.hello):
            each.epoch = epoch
        self.fence.serves(session, epoch)
        self.kv.claimed(session.hello.cohort, epoch)
        engine = session.hello.engine
        for each in self.sessions.values():
            if each.hello.cohort == session.hello.cohort and each.hello.engine != engine:
                each.port.send(wire.EpochChanged(epoch=epoch))

    def _sessions_of(self, hello: wire.OpenSession) -> list[GmsSession]:
        """Return the sessions of all ranks of an engine: rank 0 alone claims epochs, for all of them."""
        key = hello.cohort, hello.engine
        return [each for each in self.sessions.values() if (each.hello.cohort, each.hello.engine) == key]

    def _release_notes(self, session: int) -> None:
        """Remove the notes that no session keeps any more."""
        for key, keepers in list(self.note_keepers.items()):
            keepers.discard(session)
            if not keepers:
                del self.note_keepers[key]
                self.notes.pop(key, None)

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
                is_taken = isinstance(event, TakeEvent) and isinstance(effect, DoneEffect)
                if answered is not None and not is_taken:  # else `SlabCalls.allocate` sends the slabs
                    session.port.send(answer(self, effect, answered, event, session))
            else:
                self._carry_out(effect)
        if own is not None and isinstance(event, AskEvent):  # it was not answered: it waits
            self.sessions[own].ask_call = call or 0
            self.note_event("waits", f"{self.name(own)} for weights")

    def _carry_out(self, effect: WeightsEffect) -> None:
        match effect:
            case CommitEffect():
                found = self.state.generations[effect.generation]
                version = self.state.version_in(effect.cohort, effect.generation)
                text = f"generation {effect.generation} of cohort {effect.cohort!r}"
                self.note_event("committed", f"{text}, version {version!r}")
                notice = wire.GenerationChanged(
                    generation=effect.generation,
                    weight_version=version,
                    model_path=found.model_path,
                )
                self._notify(self._of_cohort(effect.readers, effect.cohort), notice)
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

    def _of_cohort(self, readers: Sequence[int], cohort: str) -> list[int]:
        """Return the readers of one cohort.

        Cohorts read one generation together if it was loaded from files; each updates and renames it alone.
        """
        found = ((number, self.sessions.get(number)) for number in readers)
        return [number for number, each in found if each is not None and each.hello.cohort == cohort]

    def _notify(self, sessions: Sequence[int], notice: wire.Reply) -> None:
        for number in sessions:
            if (session := self.sessions.get(number)) is not None:
                session.port.send(notice)

    def _save(self) -> None:
        if self.keeper is not None:
            self.keeper.save(self)

    # What people see.

    def name(self, number: int) -> str:
        """Return what an engine's session is called in messages."""
        session = self.sessions.get(number)
        return f"session {number}" if session is None else session.name

    def note_event(self, kind: str, text: str) -> None:
        """Add an event to the ring."""
        self.num_events += 1
        self.events.append(wire.ServiceEvent(number=self.num_events, at=time.time(), kind=kind, text=text))
        logger.debug("%s: %s", kind, text)
