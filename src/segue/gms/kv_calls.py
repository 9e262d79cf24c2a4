"""The KV memory of all cohorts: carries the lease of each rank out, which `kv_fsm.py` is as data.

A set lives as long as its cohort has engines. Neither the service nor its holder keeps it over the end of the
service: the engine that writes to it has it mapped, and the next one gets other memory.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from segue.errors import MemoryServiceError, SlabMemoryError
from segue.gms import messages as wire
from segue.gms.kv_fsm import kv_step
from segue.gms.kv_state import (
    FreeKV,
    GrantKV,
    KillWriter,
    KVAbandonedEvent,
    KVAskEvent,
    KVEndedEvent,
    KVEpochEvent,
    KVGoneEvent,
    KVLeaseEvent,
    KVLeaseShape,
    KVMadeEvent,
    KVPhase,
    KVPreparedEvent,
    KVRefusalCode,
    KVReleased,
    KVReleaseEvent,
    KVState,
    KVTickEvent,
    KVWithdrawEvent,
    MakeKV,
    RefuseKV,
)
from segue.gms.lock_state import Cohort
from segue.gms.session import GmsSession
from segue.gms.transport import GmsFrameError, close
from segue.logs import logger
from segue.memory.memfd import GRANULARITY, MemfdVMM
from segue.sizes import ceil_div, round_up

if TYPE_CHECKING:
    from segue.gms.service import MemoryService

RETRY_MEMORY_S = 0.05  # the memory of a process that was killed is free within 0.1 s

_Key = tuple[str, int]  # cohort and rank


@dataclass(frozen=True, slots=True, kw_only=True)
class KVMemory:
    """The descriptors of a set."""

    shape: KVLeaseShape
    sizes: list[int]
    slabs: list[int]
    journal: int | None


class KVLeases:
    """The leases of all ranks of all cohorts, and the calls about them."""

    def __init__(self, service: MemoryService) -> None:
        self._service = service
        self._states: dict[_Key, KVState] = {}  # of the ranks that have asked
        self._sets: dict[tuple[_Key, int], KVMemory] = {}  # by rank, and number of the set
        self._calls: dict[int, int] = {}  # by the session that waits
        self._errors: dict[_Key, str] = {}  # why the last set could not be made
        self._tasks: set[asyncio.Task[None]] = set()

    # What comes from clients and processes.

    async def ask(self, session: GmsSession, message: wire.AskKV) -> None:
        """Carry an ask out; the answer may come later.

        Raises:
            GmsFrameError: the session is not one of a rank.
        """
        hello, store = session.hello, self._service.store
        if hello.tag != "weights":
            raise GmsFrameError("only a rank of an engine has KV memory")
        granularity = await store.on_device(hello.device, lambda: store.vmms[hello.device].granularity)
        for name, value in (("pool_bytes", message.pool_bytes), ("slab_bytes", message.slab_bytes)):
            if value % granularity:
                text = f"{name} is {value}, and has to be a multiple of {granularity} on this device"
                session.refuse(message.call, "slabs", f"{text}; round it up")
                return
        if session.port.has_left():  # it may have asked in a later session, or have memory of its own by now
            return
        shape = KVLeaseShape(message.pool_bytes, message.slab_bytes, message.journal_bytes, hello.device)
        event = KVAskEvent(
            session=session.number,
            process=self._service.fence.process_of(session.number),
            epoch=message.epoch,
            claimed=session.epoch,
            shape=shape,
            deadline=time.monotonic() + message.wait_s,
        )
        self._calls.setdefault(session.number, message.call)
        self._step(_key(session), event, message.call)

    def withdraw(self, session: GmsSession, call: int) -> None:
        """Take back what a rank waits for, or was granted and does not use; it has memory of its own."""
        key = _key(session)
        self._calls.pop(session.number, None)
        if key in self._states:
            process = self._service.fence.process_of(session.number)
            event = KVWithdrawEvent(session=session.number, process=process, epoch=session.epoch)
            self._service.note_event("kv_withdrawn", f"{_name(key)}: {session.name} has memory of its own")
            self._step(key, event)
        session.port.send(wire.CallDone(call=call))

    def release(self, session: GmsSession, call: int) -> None:
        """Take memory back from its writer."""
        self._step(_key(session), KVReleaseEvent(session=session.number), call)

    def prepared(self, session: GmsSession, call: int) -> None:
        """Note that a rank has prepared its memory, which was fresh."""
        if _key(session) in self._states:
            self._step(_key(session), KVPreparedEvent(session=session.number))
        session.port.send(wire.CallDone(call=call))

    def gone(self, session: GmsSession) -> None:
        """Note the end of a session; its process may still write."""
        self._calls.pop(session.number, None)
        if _key(session) in self._states:
            self._step(_key(session), KVGoneEvent(session=session.number))
        if not self._has_engine(session.hello.cohort):  # the sets of its other ranks are left
            for key in [key for key in self._states if key[0] == session.hello.cohort]:
                self._step(key, KVAbandonedEvent())

    def ended(self, process: int) -> None:
        """Note the end of a process, by its number in the fence."""
        for key in list(self._states):
            self._step(key, KVEndedEvent(process=process))

    def claimed(self, cohort: str, epoch: int) -> None:
        """Note that an engine has claimed an epoch: those before it get nothing any more."""
        for key in [key for key in self._states if key[0] == cohort]:
            self._step(key, KVEpochEvent(epoch=epoch))

    def tick(self) -> None:
        """Let time pass."""
        for key in list(self._states):
            self._step(key, KVTickEvent())

    def close(self) -> None:
        """Make no memory any more, and give up what is not the store's."""
        for task in self._tasks:
            task.cancel()
        for memory in self._sets.values():
            close([] if memory.journal is None else [memory.journal])
        self._sets.clear()
        self._states.clear()

    # What others want to know.

    def has_writer(self, process: int) -> bool:
        """Whether a process may write to a set, or waits for one."""
        for state in self._states.values():
            writers = [memory.writer for memory in (state.current, state.old) if memory is not None]
            if process in writers or (state.ask is not None and state.ask.process == process):
                return True
        return False

    def rows(self) -> list[dict[str, object]]:
        """Return the sets for people and tools."""
        found: list[dict[str, object]] = []
        for (cohort, rank), state in self._states.items():
            sets = [memory for memory in (state.current, state.old) if memory is not None]
            found.append(
                {
                    "cohort": cohort,
                    "rank": rank,
                    "phase": state.phase.name.lower(),
                    "epoch": state.epoch,
                    "bytes": sum(memory.shape.pool_bytes for memory in sets),
                    "journal_bytes": sum(memory.shape.journal_bytes for memory in sets),
                    "user": None if state.phase is KVPhase.SHAPED else self._writer(state),
                    "waits": None if state.ask is None else self._service.name(state.ask.session),
                }
            )
        return found

    # The lease.

    def _step(self, key: _Key, event: KVLeaseEvent, call: int = 0) -> None:
        """Take a step of a rank's lease, and carry its effects out; `call` is the one that the event is."""
        epoch = self._service.state.cohorts.get(key[0], Cohort()).epoch
        before = self._states.get(key) or KVState(epoch=epoch)
        state, effects = kv_step(before, event, time.monotonic())
        self._states[key] = state
        if state.phase is KVPhase.QUARANTINED and before.phase is not KVPhase.QUARANTINED:
            self._service.note_event("kv_quarantined", f"{_name(key)}: {self._writer(state)} may still write")
        for effect in effects:
            match effect:
                case MakeKV():
                    task = asyncio.get_running_loop().create_task(self._make(key, effect))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                case GrantKV():
                    self._grant(key, effect)
                case RefuseKV():
                    own = isinstance(event, KVAskEvent) and event.session == effect.session
                    self._refuse(key, before, effect, event if own else None, call if own else 0)
                case FreeKV():
                    self._free(key, effect.number)
                case KillWriter():
                    self._service.fence.kill(effect.process)
                case KVReleased():
                    self._service.sessions[effect.session].port.send(wire.CallDone(call=call))
        if state.phase is KVPhase.EMPTY and state.ask is None:
            del self._states[key]
        elif not self._has_engine(key[0]) and not isinstance(event, KVAbandonedEvent):
            self._step(key, KVAbandonedEvent())

    async def _make(self, key: _Key, effect: MakeKV) -> None:
        """Take memory for a set. While the device has too little, it is tried again until the deadline."""
        made: KVMemory | None = None
        self._errors.pop(key, None)
        while made is None:
            try:
                made = await self._create(effect.shape)
            except SlabMemoryError as error:
                if self._errors.get(key) != error.message:
                    self._service.note_event("out_of_memory", f"{_name(key)}: {error.message}")
                self._errors[key] = error.message
                state = self._states[key]
                # If there is an old set, its writer's end has been waited for already.
                if state.old is not None or state.ask is None or state.ask.deadline <= time.monotonic():
                    break
                await asyncio.sleep(RETRY_MEMORY_S)
            except Exception as error:
                if not isinstance(error, MemoryServiceError):
                    logger.exception("the memory service cannot make KV memory")
                self._errors[key] = str(error)
                break
        if made is not None:
            self._sets[key, effect.number] = made
        self._step(key, KVMadeEvent(is_made=made is not None))

    async def _create(self, shape: KVLeaseShape) -> KVMemory:
        """Return new memory, all of it or none.

        Raises:
            SlabMemoryError: the device or the host has too little memory.
            MemoryServiceError: there would be too many slabs.
        """
        store, pool, slab = self._service.store, shape.pool_bytes, shape.slab_bytes
        if (count := ceil_div(pool, slab)) > wire.MAX_SLABS:  # a list of so many would keep others waiting
            text = (
                f"a set of {count} slabs of {slab} bytes would exceed {wire.MAX_SLABS}, which the service has"
            )
            raise MemoryServiceError(f"{text} at most; use larger slabs")
        sizes = [min(slab, pool - start) for start in range(0, pool, slab)]
        slabs = await store.create(shape.device, sizes)
        journal: int | None = None
        if shape.journal_bytes:
            num_bytes = round_up(shape.journal_bytes, GRANULARITY)
            try:
                journal = await store.on_device(shape.device, lambda: MemfdVMM().create(num_bytes))
            except BaseException:
                store.free(slabs)
                raise
        return KVMemory(shape=shape, sizes=sizes, slabs=slabs, journal=journal)

    def _free(self, key: _Key, number: int) -> None:
        memory = self._sets.pop((key, number))
        num_bytes = self._service.store.free(memory.slabs)
        close([] if memory.journal is None else [memory.journal])
        self._service.note_event("kv_freed", f"{_name(key)}: {num_bytes} bytes")

    def _grant(self, key: _Key, effect: GrantKV) -> None:
        """Send the descriptors of a set, in as many messages as they need."""
        session, call = self._service.sessions[effect.session], self._calls.pop(effect.session)
        memory, step = self._sets[key, effect.number], wire.MAX_DESCRIPTORS
        descriptors = memory.slabs + ([] if memory.journal is None else [memory.journal])
        for first in range(0, len(descriptors), step):
            part = slice(first, first + step)
            granted = wire.KVGranted(
                call=call,
                sizes=memory.sizes[part],
                is_fresh=effect.is_fresh,
                more=first + step < len(descriptors),
            )
            session.port.send(granted, descriptors[part])
        what = "fresh" if effect.is_fresh else "that of the engine before"
        text = f"{memory.shape.pool_bytes} bytes, {what}, to {session.name}"
        self._service.note_event("kv_granted", f"{_name(key)}: {text}")

    def _refuse(
        self, key: _Key, before: KVState, effect: RefuseKV, event: KVLeaseEvent | None, call: int
    ) -> None:
        """Answer an ask with a refusal: the `event`, which is that of `call`, or the ask that waits."""
        session = self._service.sessions.get(effect.session)
        waiting = self._calls.get(effect.session, 0)
        if waiting and call in (0, waiting):
            del self._calls[effect.session]
        text = self._reason(key, before, effect.code, event)
        self._service.note_event("refused", f"{effect.code}: {self._service.name(effect.session)}: {text}")
        if session is not None:
            session.refuse(call or waiting, effect.code, text)

    def _reason(self, key: _Key, before: KVState, code: KVRefusalCode, event: KVLeaseEvent | None) -> str:
        """Return the text of a refusal of an event, or of the ask that waits."""
        what, error = _name(key), self._errors.get(key, "")
        match code:
            case "stale_epoch":
                epoch = self._states[key].epoch
                if isinstance(event, KVAskEvent):
                    epoch = max(epoch, event.claimed)
                return f"{what}: an engine has asked, or has claimed, with epoch {epoch}; this one must end"
            case "unclaimed":
                assert isinstance(event, KVAskEvent)
                text = f"epoch {event.epoch} is not one that this engine has claimed"
                highest = f"its highest is {event.claimed}" if event.claimed else "it has claimed none"
                return f"{what}: {text}; {highest}, and an engine asks with that"
            case "held":
                text = f"{self._writer(before)} has it, or waits for it, under epoch {before.epoch}"
                return f"{what}: {text}; an engine asks once, with an epoch that it has claimed"
            case "fence":
                return (
                    f"{what}: {self._writer(before)} has not ended in time, so what it writes to is given to "
                    f"nobody, and there is no other memory ({error}); end that process, or raise "
                    "--fence-timeout-s"
                )
            case "memory":
                return f"{what}: {error}"

    def _writer(self, state: KVState) -> str:
        """Return what the process is called that may write, or is to."""
        if state.holder is not None:
            return self._service.name(state.holder)
        for memory in (state.current, state.old):
            if memory is not None and memory.writer is not None:
                return self._service.fence.who(memory.writer)
        return "nobody" if state.ask is None else self._service.name(state.ask.session)

    def _has_engine(self, cohort: str) -> bool:
        sessions = self._service.sessions.values()
        return any(each.hello.tag == "weights" and each.hello.cohort == cohort for each in sessions)


def _key(session: GmsSession) -> _Key:
    return session.hello.cohort, session.hello.rank


def _name(key: _Key) -> str:
    return f"KV of cohort {key[0]!r}, rank {key[1]}"
