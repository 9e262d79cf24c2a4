"""The lease of KV memory: every reachable state, random walks, planted bugs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.gms.kv_fsm import KVLease, kv_step
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
    KVReleased,
    KVReleaseEvent,
    KVState,
    KVTickEvent,
    KVWithdrawEvent,
    MakeKV,
    RefuseKV,
)
from tests.gms.exploring import Violation, explore

SMALL, LARGE = KVLeaseShape(2, 2), KVLeaseShape(4, 2)
DEADLINE, LATE = 1.0, 9.0
MAX_EPOCH = 2
SESSIONS = (1, 2, 3, 4)  # 3 is a later one of the process of 1; session 4 has no pidfd
PROCESSES: dict[int, int | None] = {1: 11, 2: 12, 3: 11, 4: None}


@dataclass(frozen=True, slots=True)
class World:
    """The lease, and what is true of the processes and of memory."""

    lease: KVState = field(default_factory=KVState)
    waiting: frozenset[int] = frozenset()  # sessions that are owed an answer
    living: frozenset[int] = frozenset(SESSIONS)  # sessions whose process runs
    mapped: frozenset[tuple[int, int]] = frozenset()  # (session, set): it may write there
    prepared: frozenset[int] = frozenset()  # sets whose holder has said so
    sets: frozenset[int] = frozenset()  # those that the service holds
    granted: int = 0  # the epoch of the last grant


def need(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


def sessions_of(process: int) -> set[int]:
    return {session for session, its in PROCESSES.items() if its == process}


def until(session: int) -> set[int]:
    """A session and the earlier ones of its process, which it speaks for."""
    process = PROCESSES[session]
    return {session} if process is None else {each for each in sessions_of(process) if each <= session}


def ask(session: int, epoch: int, shape: KVLeaseShape, claimed: int | None = None) -> KVAskEvent:
    return KVAskEvent(
        session=session,
        process=PROCESSES[session],
        epoch=epoch,
        claimed=epoch if claimed is None else claimed,
        shape=shape,
        deadline=DEADLINE,
    )


def events(world: World) -> Iterator[tuple[KVLeaseEvent, float]]:
    users = world.waiting | {session for session, _ in world.mapped}
    for session in SESSIONS:
        if session in world.living:
            if session not in world.waiting and not (session == 1 and 3 in users):  # 1 has ended then
                for epoch in range(1, MAX_EPOCH + 1):
                    yield ask(session, epoch, SMALL), 0.0
                    if session == 2:
                        yield ask(session, epoch, LARGE), 0.0
                    if session == 1:
                        yield ask(session, epoch, SMALL, claimed=MAX_EPOCH - epoch + 1), 0.0
            yield KVReleaseEvent(session=session), 0.0
            yield KVPreparedEvent(session=session), 0.0
            for epoch in range(1, MAX_EPOCH + 1):
                yield KVWithdrawEvent(session=session, process=PROCESSES[session], epoch=epoch), 0.0
            yield KVGoneEvent(session=session), 0.0
            if (process := PROCESSES[session]) is not None:
                yield KVEndedEvent(process=process), 0.0
    if world.lease.phase is KVPhase.MAKING:
        yield KVMadeEvent(is_made=True), 0.0
        yield KVMadeEvent(is_made=False), 0.0
    yield KVEpochEvent(epoch=MAX_EPOCH), 0.0
    yield KVAbandonedEvent(), 0.0
    yield KVTickEvent(), 0.0
    yield KVTickEvent(), LATE


def checked(world: World, event: KVLeaseEvent, now: float) -> World:
    lease, effects = kv_step(world.lease, event, now)
    waiting, living, mapped, sets = map(set, (world.waiting, world.living, world.mapped, world.sets))
    prepared, granted = set(world.prepared), world.granted
    match event:
        case KVAskEvent():
            waiting.add(event.session)
        case KVGoneEvent():
            waiting.discard(event.session)
        case KVEndedEvent():
            living -= sessions_of(event.process)
            waiting -= sessions_of(event.process)  # the end of its connections follows
            mapped = {(who, what) for who, what in mapped if who in living}
        case KVReleaseEvent() if event.session == world.lease.holder:
            mapped = {(who, what) for who, what in mapped if who not in until(event.session)}
        case KVWithdrawEvent():
            waiting -= until(event.session)
            mapped = {(who, what) for who, what in mapped if who not in until(event.session)}
        case KVPreparedEvent() if event.session == world.lease.holder:
            assert world.lease.current is not None
            prepared.add(world.lease.current.number)
        case KVMadeEvent(is_made=True):
            assert world.lease.current is not None
            sets.add(world.lease.current.number)
    for effect in effects:
        match effect:
            case GrantKV():
                need(effect.number in sets, "a set that is not there is granted")
                writers = {who for who, what in mapped if what == effect.number}
                need(writers <= until(effect.session), "a set is granted that others write to")
                asked = event if isinstance(event, KVAskEvent) else world.lease.ask
                assert asked is not None
                need(asked.epoch >= granted, "an older engine is granted")
                is_fresh = effect.number not in prepared
                need(effect.is_fresh == is_fresh, "what is in a set is not what its holder is told")
                need(
                    effect.session in waiting & living,
                    "a session is granted that has not asked, or has ended",
                )
                granted = asked.epoch
                waiting.discard(effect.session)
                mapped.add((effect.session, effect.number))
            case RefuseKV(code=code):
                if (
                    code == "stale_epoch"
                    and isinstance(event, KVAskEvent)
                    and event.session == effect.session
                ):
                    highest = max(lease.epoch, event.claimed)
                    need(event.epoch < highest, "the newest engine is refused as an old one")
                if code == "held":
                    assert isinstance(event, KVAskEvent)
                    waits = world.lease.ask
                    same = event.epoch in (granted, waits and waits.epoch)
                    own = event.session in (world.lease.holder, waits and waits.session)
                    need(same or own, "a newer engine is refused")
                waiting.discard(effect.session)
            case FreeKV():
                need(effect.number in sets, "a set is freed twice")
                sets.discard(effect.number)
            case KillWriter():
                own = sessions_of(effect.process)
                need(getattr(event, "session", 0) not in own, "who asks is killed")
            case MakeKV() | KVReleased():
                pass
    kept = {each.number for each in (lease.current, lease.old) if each is not None}
    if lease.phase is KVPhase.MAKING and lease.current is not None:
        kept.discard(lease.current.number)
    need(kept == sets, "a set is lost, or one that was freed is kept")
    if isinstance(event, KVAskEvent):
        need(event.epoch >= world.lease.epoch or event.session not in waiting, "an older engine waits")
        is_right = event.epoch == event.claimed
        need(is_right or lease == world.lease, "an epoch that its engine has not claimed changes something")
    asked = set() if lease.ask is None else {lease.ask.session}
    need(waiting <= asked, "a session waits that nobody will answer")
    if lease.phase is KVPhase.QUARANTINED:
        writer = lease.current and lease.current.writer
        ends = writer is not None and bool(sessions_of(writer) & living)
        need(ends, "a quarantine that nothing ends")
    need(lease.phase in (KVPhase.MAKING, KVPhase.QUARANTINED) or lease.ask is None, "an ask is not answered")
    if isinstance(event, KVWithdrawEvent):
        holder, held = world.lease.holder, world.lease.current
        is_held = held is not None and (holder, held.number) in mapped
        need(not is_held or lease.holder == holder, "what another session has is taken from it")
        if event.epoch < world.lease.epoch:
            is_freed = any(isinstance(effect, FreeKV) for effect in effects)
            need(lease.ask is not None or not is_freed, "an older engine frees what a newer one may want")
        else:
            is_used = lease.current is not None and (lease.holder, lease.current.number) in mapped
            need(is_used or lease.ask is not None or not sets, "memory is kept that nobody uses")
    if isinstance(event, KVTickEvent) and now == LATE:
        need(lease.phase is not KVPhase.QUARANTINED or lease.ask is None, "a session waits too long")
    return World(lease, *map(frozenset, (waiting, living, mapped, prepared & sets, sets)), granted)  # type: ignore[arg-type]


def renumbered(world: World) -> World:
    """The same world with the smallest numbers of sets; a process that has ended is replaced by a new one."""
    lease = world.lease
    numbers = sorted({each.number for each in (lease.current, lease.old) if each} | set(world.sets))
    new = {old: number for number, old in enumerate(numbers, 1)}

    def renew(each: object) -> object:
        return None if each is None else replace(each, number=new[each.number])  # type: ignore

    lease = replace(lease, current=renew(lease.current), old=renew(lease.old), serial=len(new))
    return replace(
        world,
        lease=lease,
        living=frozenset(SESSIONS),
        sets=frozenset(new[number] for number in world.sets),
        mapped=frozenset((who, new[what]) for who, what in world.mapped if what in new),
        prepared=frozenset(new[number] for number in world.prepared),
    )


def identity(world: World) -> Hashable:
    return replace(world, granted=0)


def explored() -> int:
    return explore(World(), events, lambda world, event: renumbered(checked(world, *event)), identity)


def test_every_reachable_state_keeps_the_invariants() -> None:
    assert explored() > 100


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_walks_keep_the_invariants(data: st.DataObject) -> None:
    world = World()
    for _ in range(30):
        possible = list(events(world))
        event, now = possible[data.draw(st.integers(0, len(possible) - 1))]
        world = renumbered(checked(world, event, now))


Patch = pytest.MonkeyPatch
BUGS: dict[str, Callable[[Patch], None]] = {}


def bug(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    BUGS[plant.__name__] = plant
    return plant


@bug
def the_end_of_a_connection_counts_as_the_end_of_its_process(patch: Patch) -> None:
    gone = KVLease.gone

    def hasty(self: KVLease, session: int) -> None:
        current = self.state.current
        if session == self.state.holder and current is not None:
            current = replace(current, writer=None, is_quiet=True)
            self.set(phase=KVPhase.SHAPED, holder=None, current=current)
        gone(self, session)

    patch.setattr(KVLease, "gone", hasty)


@bug
def a_process_without_a_pidfd_counts_as_ended(patch: Patch) -> None:
    quarantine = KVLease.quarantine

    def trusting(self: KVLease) -> None:
        current = self.state.current
        if current is not None and current.writer is None:
            self.set(phase=KVPhase.SHAPED, holder=None, current=replace(current, is_quiet=True))
            if self.state.ask is not None:
                self.reuse()
        else:
            quarantine(self)

    patch.setattr(KVLease, "quarantine", trusting)


@bug
def an_older_engine_is_granted_memory(patch: Patch) -> None:
    on_ask = KVLease.on_ask
    patch.setattr(
        KVLease, "on_ask", lambda self, event: on_ask(self, replace(event, epoch=max(event.epoch, 2)))
    )


@bug
def an_epoch_below_the_claimed_one_counts(patch: Patch) -> None:
    on_ask = KVLease.on_ask
    patch.setattr(
        KVLease,
        "on_ask",
        lambda self, event: on_ask(self, replace(event, claimed=min(event.claimed, event.epoch))),
    )


@bug
def an_epoch_above_the_claimed_one_counts(patch: Patch) -> None:
    on_ask = KVLease.on_ask
    patch.setattr(
        KVLease,
        "on_ask",
        lambda self, event: on_ask(self, replace(event, claimed=max(event.claimed, event.epoch))),
    )


@bug
def a_set_is_lost_when_there_is_too_little_memory(patch: Patch) -> None:
    made = KVLease.made

    def forgetful(self: KVLease, is_made: bool) -> None:
        if not is_made:
            self.set(old=None)
        made(self, is_made)

    patch.setattr(KVLease, "made", forgetful)


@bug
def an_engine_that_has_claimed_is_taken_for_the_holder(patch: Patch) -> None:
    on_ask = KVLease.on_ask

    def mistaken(self: KVLease, event: KVAskEvent) -> None:
        self.set(granted=self.state.epoch)
        on_ask(self, event)

    patch.setattr(KVLease, "on_ask", mistaken)


@bug
def a_writer_that_asks_again_is_killed(patch: Patch) -> None:
    patch.setattr(KVLease, "grant_again", lambda self, memory: self.quarantine())


@bug
def what_was_granted_counts_as_prepared(patch: Patch) -> None:
    grant = KVLease.grant

    def trusting(self: KVLease, memory: object) -> None:
        grant(self, memory)  # type: ignore[arg-type]
        assert self.state.current is not None
        self.set(current=replace(self.state.current, is_fresh=False))

    patch.setattr(KVLease, "grant", trusting)


@bug
def what_was_prepared_is_fresh_for_the_next_engine(patch: Patch) -> None:
    patch.setattr(KVLease, "prepared", lambda self, session: None)


@bug
def any_session_may_say_that_a_set_is_prepared(patch: Patch) -> None:
    prepared = KVLease.prepared
    patch.setattr(KVLease, "prepared", lambda self, session: prepared(self, self.state.holder or 0))


@bug
def memory_is_given_up_while_an_engine_waits_for_it(patch: Patch) -> None:
    abandon = KVLease.abandon

    def careless(self: KVLease) -> None:
        ask = self.state.ask
        if self.state.phase is KVPhase.QUARANTINED:
            self.set(ask=None)
        abandon(self)
        self.set(ask=ask)

    patch.setattr(KVLease, "abandon", careless)


@bug
def an_ask_is_withdrawn_and_its_grant_is_not(patch: Patch) -> None:
    withdraw = KVLease.withdraw

    def half(self: KVLease, event: KVWithdrawEvent) -> None:
        if self.state.ask is not None and self.state.ask.session == event.session:
            withdraw(self, event)

    patch.setattr(KVLease, "withdraw", half)


@bug
def an_older_engine_that_withdraws_frees_what_a_newer_one_wants(patch: Patch) -> None:
    withdraw = KVLease.withdraw
    patch.setattr(
        KVLease, "withdraw", lambda self, event: withdraw(self, replace(event, epoch=self.state.epoch))
    )


@bug
def what_a_process_got_in_a_later_session_counts_as_withdrawn(patch: Patch) -> None:
    patch.setattr(
        "segue.gms.kv_fsm.is_of",
        lambda event, session, process: session == event.session or process == event.process is not None,
    )


@bug
def what_a_new_set_was_to_replace_is_kept_after_a_withdrawal(patch: Patch) -> None:
    abandon = KVLease.abandon

    def partly(self: KVLease) -> None:
        if self.state.phase is not KVPhase.MAKING:
            abandon(self)

    patch.setattr(KVLease, "abandon", partly)


@bug
def a_session_waits_for_a_process_for_ever(patch: Patch) -> None:
    patch.setattr(KVLease, "tick", lambda self: None)


@bug
def the_replaced_set_is_kept(patch: Patch) -> None:
    grant = KVLease.grant

    def hoarding(self: KVLease, memory: object) -> None:
        self.effects = [each for each in self.effects if not isinstance(each, FreeKV)]
        grant(self, memory)  # type: ignore[arg-type]

    patch.setattr(KVLease, "grant", hoarding)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: Patch) -> None:
    BUGS[name](monkeypatch)
    with pytest.raises(Violation):
        explored()
