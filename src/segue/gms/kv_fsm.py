"""The lease of a cohort's KV memory on one rank, as pure data: who may write to it, and who may do so next.

A successor gets its predecessor's memory only once the predecessor's process has ended, which its pidfd
proves: a closed connection alone does not, as kernels may still run. If that takes too long, the successor
gets fresh memory, and the service gives its descriptors of the old memory up: the kernel frees it with the
last mapping. Without a pidfd nothing is ever proved, so then every successor gets fresh memory.

Memory is fresh until an engine says that it has prepared it: on a device, it has zeros then, and not what any
other program had there. One that is killed before leaves it fresh.

Nothing here does I/O: :func:`kv_step` returns effects, which the server carries out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from segue.gms.kv_state import (
    FreeKV,
    GrantKV,
    KillWriter,
    KVAbandonedEvent,
    KVAskEvent,
    KVEffect,
    KVEndedEvent,
    KVEpochEvent,
    KVGoneEvent,
    KVLeaseEvent,
    KVMadeEvent,
    KVPhase,
    KVPreparedEvent,
    KVReleased,
    KVReleaseEvent,
    KVSet,
    KVState,
    KVTickEvent,
    KVWithdrawEvent,
    MakeKV,
    RefuseKV,
)


def kv_step(state: KVState, event: KVLeaseEvent, now: float = 0.0) -> tuple[KVState, list[KVEffect]]:
    """Return the state after an event, and what is to be done, in order."""
    lease = KVLease(state, now)
    lease.apply(event)
    return lease.state, lease.effects


class KVLease:
    """One step of the lease."""

    def __init__(self, state: KVState, now: float) -> None:
        self.state = state
        self.now = now
        self.effects: list[KVEffect] = []

    def apply(self, event: KVLeaseEvent) -> None:
        """Apply an event; then see whether the session that waits can be answered."""
        match event:
            case KVAskEvent():
                self.on_ask(event)
            case KVMadeEvent():
                self.made(event.is_made)
            case KVGoneEvent():
                self.gone(event.session)
            case KVReleaseEvent():
                self.release(event.session)
            case KVPreparedEvent():
                self.prepared(event.session)
            case KVWithdrawEvent():
                self.withdraw(event)
            case KVEndedEvent():
                self.ended(event.process)
            case KVEpochEvent():
                self.raise_epoch(event.epoch)
            case KVAbandonedEvent():
                self.abandon()
            case KVTickEvent():
                self.tick()
            case _:
                assert_never(event)

    def on_ask(self, ask: KVAskEvent) -> None:
        """Take a request; of two that wait, the one of the higher epoch stays."""
        state = self.state
        if ask.epoch < max(state.epoch, ask.claimed):
            self.effects.append(RefuseKV(ask.session, "stale_epoch"))
            return
        if ask.epoch > ask.claimed:
            self.effects.append(RefuseKV(ask.session, "unclaimed"))
            return
        waits = state.ask
        is_second = waits is not None and waits.epoch == ask.epoch
        if state.phase is KVPhase.LEASED:  # a claim may have raised `state.epoch` meanwhile
            is_second = is_second or state.granted == ask.epoch
        if is_second or ask.session in (state.holder, None if waits is None else waits.session):
            self.effects.append(RefuseKV(ask.session, "held"))
            return
        self.raise_epoch(ask.epoch)
        self.set(ask=ask)
        current = self.state.current
        match self.state.phase:
            case KVPhase.EMPTY:
                self.make()
            case KVPhase.LEASED | KVPhase.QUARANTINED if (
                current and current.writer == ask.process is not None
            ):
                self.grant_again(current)
            case KVPhase.SHAPED:
                self.reuse()
            case KVPhase.LEASED | KVPhase.QUARANTINED:
                self.quarantine()
            case KVPhase.MAKING:
                pass  # `made` compares the shapes

    def quarantine(self) -> None:
        """Wait for the end of the process that writes; nothing proves that of a process without a pidfd."""
        current = self.state.current
        assert current is not None
        self.set(phase=KVPhase.QUARANTINED, holder=None)
        if current.writer is not None:
            if self.state.ask is not None:
                self.effects.append(KillWriter(current.writer))
            return
        self.effects.append(FreeKV(current.number))
        self.set(phase=KVPhase.EMPTY, current=None)
        if self.state.ask is not None:
            self.make()

    def make(self, old: KVSet | None = None) -> None:
        """Take memory for the session that waits, in place of the set `old`."""
        ask, serial = self.state.ask, self.state.serial + 1
        assert ask is not None
        current = KVSet(number=serial, shape=ask.shape)
        self.set(phase=KVPhase.MAKING, current=current, old=old, serial=serial)
        self.effects.append(MakeKV(serial, ask.shape))

    def reuse(self) -> None:
        """Give the free set to the session that waits, or a new one if it has another shape."""
        ask, current = self.state.ask, self.state.current
        assert ask is not None and current is not None and current.is_quiet
        if current.shape == ask.shape:
            self.grant(current)
        else:
            self.effects.append(FreeKV(current.number))
            self.make()

    def grant(self, memory: KVSet) -> None:
        """Lease a set to the session that waits."""
        ask = self.state.ask
        assert ask is not None
        memory = replace(memory, writer=ask.process, session=ask.session, is_quiet=False)
        self.set(phase=KVPhase.LEASED, current=memory, old=None, holder=ask.session, ask=None)
        self.set(granted=ask.epoch)
        self.effects.append(GrantKV(ask.session, memory.number, memory.is_fresh))

    def grant_again(self, memory: KVSet) -> None:
        """Lease a set to its own writer, which has lost its session and may never have got the answer."""
        ask = self.state.ask
        assert ask is not None
        if memory.shape == ask.shape:
            self.grant(memory)
        else:
            self.effects.append(FreeKV(memory.number))
            self.make()

    def made(self, is_made: bool) -> None:
        """Grant what was made. If there is too little memory, the set that it was to replace stays."""
        ask, current, old = self.state.ask, self.state.current, self.state.old
        if self.state.phase is not KVPhase.MAKING or current is None:
            return
        if is_made and ask is not None and ask.shape == current.shape:
            if old is not None:
                self.effects.append(FreeKV(old.number))
            self.grant(current)
            return
        if is_made:  # the session has gone meanwhile, or another one with another shape has come
            self.effects.append(FreeKV(current.number))
        if old is None:
            self.set(phase=KVPhase.EMPTY, current=None)
        else:
            self.set(phase=KVPhase.SHAPED if old.is_quiet else KVPhase.QUARANTINED, current=old, old=None)
        if ask is None:
            return
        if old is not None and old.is_quiet:
            self.reuse()
        elif is_made:
            self.make(old)
        else:
            self.effects.append(RefuseKV(ask.session, "memory" if old is None else "fence"))
            self.set(ask=None)

    def gone(self, session: int) -> None:
        """Note the end of a connection; the process at its other end may still write."""
        if self.state.ask is not None and self.state.ask.session == session:
            self.set(ask=None)
        elif self.state.holder == session:
            self.quarantine()

    def release(self, session: int) -> None:
        """Take the memory back from a holder that says that it has unmapped it; others have none."""
        if self.state.holder == session:
            self.vacate()
        self.effects.append(KVReleased(session))

    def vacate(self) -> None:
        """Note that nobody can write to the present set, and give it to the session that waits."""
        assert self.state.current is not None
        self.set(phase=KVPhase.SHAPED, holder=None, current=quiet(self.state.current))
        if self.state.ask is not None:
            self.reuse()

    def withdraw(self, event: KVWithdrawEvent) -> None:
        """Take back what a rank has, or may yet be told that it has; free what the newest engine leaves."""
        ask, current, old = self.state.ask, self.state.current, self.state.old
        if ask is not None and is_of(event, ask.session, ask.process):
            self.set(ask=None)
        if old is not None and is_of(event, old.session, old.writer):
            self.set(old=quiet(old))
        if current is not None and is_of(event, current.session, current.writer):
            self.vacate()
        if event.epoch >= self.state.epoch:
            self.abandon()

    def prepared(self, session: int) -> None:
        """Note that what the holder has is not fresh any more; any other session has nothing."""
        current = self.state.current
        if self.state.holder == session and current is not None:
            self.set(current=replace(current, is_fresh=False))

    def ended(self, process: int) -> None:
        """Note the end of a process: what it alone could write is free, and it gets nothing more."""
        if self.state.ask is not None and self.state.ask.process == process:
            self.set(ask=None)  # its pidfd fires only once: nothing would end its lease
        state = self.state
        if state.old is not None and state.old.writer == process:
            self.set(old=quiet(state.old))
        if state.current is not None and state.current.writer == process:
            self.vacate()

    def abandon(self) -> None:
        """Give up what nobody holds; a process that may still write keeps the memory by its mapping."""
        state = self.state
        if state.ask is not None:
            return
        if state.phase in (KVPhase.QUARANTINED, KVPhase.SHAPED):
            assert state.current is not None
            self.effects.append(FreeKV(state.current.number))
            self.set(phase=KVPhase.EMPTY, current=None)
        elif state.old is not None:  # `made` frees the new one
            self.effects.append(FreeKV(state.old.number))
            self.set(old=None)

    def raise_epoch(self, epoch: int) -> None:
        """Refuse a waiting session of a lower epoch."""
        ask = self.state.ask
        if ask is not None and ask.epoch < epoch:
            self.effects.append(RefuseKV(ask.session, "stale_epoch"))
            self.set(ask=None)
        self.set(epoch=max(self.state.epoch, epoch))

    def tick(self) -> None:
        """Stop waiting for a process that does not end."""
        ask, current = self.state.ask, self.state.current
        if self.state.phase is KVPhase.QUARANTINED and ask is not None and ask.deadline <= self.now:
            self.make(current)

    def set(self, **changes: object) -> None:
        """Change fields of the state."""
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]


def quiet(memory: KVSet) -> KVSet:
    """Return a set to which nobody can write any more."""
    return replace(memory, writer=None, session=0, is_quiet=True)


def is_of(event: KVWithdrawEvent, session: int, process: int | None) -> bool:
    """Whether what a session of a process has asked for, or was granted, is withdrawn.

    The process may have asked in an earlier session; what it has got in a later one is in use.
    """
    return session == event.session or (process == event.process is not None and session < event.session)
