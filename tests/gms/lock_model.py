"""What must hold in every state of the weights' lock and in each of its steps, and the events to try."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from segue.gms import fsm
from segue.gms.granting import STALLED_S
from segue.gms.lock_state import (
    AbortEvent,
    AdoptEvent,
    AskEvent,
    AskMode,
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
    RankState,
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
from tests.gms.exploring import Violation

SOON, LATE = 1.0, 1e6  # the deadline of those that wait, and a time after all deadlines
Answer = GrantEffect | RefuseEffect | DoneEffect


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What the sessions, which are all alike, may do."""

    asks: tuple[AskEvent, ...]  # each of them by any session
    num_sessions: int = 4
    max_epoch: int = 0
    pins: Literal["none", "unpin", "all"] = "none"  # which events about pins happen
    offers: bool = False  # whether engines offer what they read, with an epoch up to max_epoch
    has_slabs: bool = False  # whether ranks get slabs: two for a load, and one for an update


def ask(mode: AskMode = "rw_or_ro", cohort: str = "a", size: int = 1, key: str = "k") -> AskEvent:
    return AskEvent(session=0, cohort=cohort, size=size, key=key, mode=mode, deadline=SOON)


def update(epoch: int) -> AskEvent:
    return replace(ask("rw"), is_update=True, epoch=epoch)


def events(scenario: Scenario, state: WeightsState) -> Iterator[tuple[WeightsEvent, float]]:
    """Yield each event that can happen in a state, with its time; of idle sessions, only those of one."""
    yield TickEvent(), 0.5
    yield TickEvent(), LATE
    busy = sessions_of(state)
    for session in [*busy, *([len(busy) + 1] if len(busy) < scenario.num_sessions else [])]:
        for each in scenario.asks:
            yield replace(each, session=session), 0.0
        yield GoneEvent(session=session), 0.0
        for lease, found in state.leases.items():
            if (rank := found.rank_of(session)) is not None:
                yield from slab_events(scenario, state, session, lease, rank)
                yield FlipEvent(session=session, lease=lease), 0.0
                yield AbortEvent(session=session, lease=lease), 0.0
                if scenario.has_slabs and not state.quarantine:  # else there would be more and more states
                    yield AbortEvent(session=session, lease=lease, is_abandoned=True), 0.0
            elif found.rank_of(session) is None and len(found.ranks) > 1:
                yield JoinEvent(session=session, lease=lease, rank=1), 0.0
        if scenario.offers:
            for epoch in range(scenario.max_epoch + 1):
                yield offer(session, epoch), 0.0
        if scenario.pins != "none":
            for generation in state.generations:
                if (session, generation) in state.pins:
                    yield UnpinEvent(session=session, generation=generation), 0.0
                elif scenario.pins == "all":
                    yield PinEvent(session=session, generation=generation), 0.0
    for name, cohort in state.cohorts.items():
        if cohort.epoch < scenario.max_epoch:
            yield ClaimEvent(session=1, cohort=name, seen=0), 0.0
        if scenario.max_epoch and cohort.current is not None:
            yield RenameEvent(session=1, cohort=name, generation=cohort.current, epoch=0, version="v"), 0.0


def offer(session: int, epoch: int) -> AdoptEvent:
    return AdoptEvent(
        session=session, sessions=(session,), cohort="a", key="k", is_loaded=True, slabs=((),), epoch=epoch
    )


def slab_events(
    scenario: Scenario, state: WeightsState, session: int, number: int, rank: int
) -> Iterator[tuple[WeightsEvent, float]]:
    """Yield how a rank can get slabs, and seal its own ones and its parent's: rightly, and wrongly."""
    lease = state.leases[number]
    own = lease.ranks[rank].own
    if not scenario.has_slabs:
        yield SealEvent(session=session, lease=number, slabs=()), 0.0
        return
    parent = () if lease.parent is None else state.generations[lease.parent].slabs[rank]
    if not own:
        first = 1 + max(slabs_of(state), default=0)
        yield TakeEvent(session=session, lease=number, slabs=(first, first + 1)[: 1 if parent else 2]), 0.0
        yield SealEvent(session=session, lease=number, slabs=parent[1:] + parent[:1] or (first,)), 0.0
    else:
        yield SealEvent(session=session, lease=number, slabs=own + parent[len(own) :]), 0.0


def slabs_of(state: WeightsState) -> list[int]:
    """All slabs that a state knows, in an order that their numbers do not decide."""
    found = [slab for each in state.generations.values() for rank in each.slabs for slab in rank]
    found += [slab for lease in state.leases.values() for rank in lease.ranks for slab in rank.own]
    found += [slab for _, slab in sorted(state.quarantine)]
    return list(dict.fromkeys(found))


def sessions_of(state: WeightsState) -> list[int]:
    """The sessions that a state knows, in an order that their numbers do not decide."""
    found = [session for lease in state.leases.values() for session in lease.sessions]
    found += [each.session for each in state.waiting]
    pins: dict[int, list[int]] = {}
    for session, generation in sorted(state.pins):
        pins.setdefault(session, []).append(generation)
    found += sorted((session for session in pins if session not in found), key=lambda session: pins[session])
    found += sorted(session for session, _ in state.quarantine)
    return list(dict.fromkeys(found))


def renumbered(state: WeightsState) -> WeightsState:
    """The same state with the smallest numbers: those of sessions, leases and generations mean nothing."""
    session = {old: new for new, old in enumerate(sessions_of(state), 1)}
    written = (lease.generation for lease in state.leases.values())
    number = {old: new for new, old in enumerate(sorted({*state.leases, *state.generations, *written}), 1)}
    slab = {old: new for new, old in enumerate(slabs_of(state), 1)}

    def slabs(found: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(slab[each] for each in found)

    def renew(lease: WeightsLease) -> WeightsLease:
        due = STALLED_S if lease.is_rw and lease.parent is None else inf
        ranks = (
            RankState(
                r.session and session[r.session],
                r.is_sealed,
                due=inf if r.is_sealed else due,
                own=slabs(r.own),
                slabs=slabs(r.slabs),
            )
            for r in lease.ranks
        )
        parent = None if lease.parent is None else number[lease.parent]
        return replace(lease, ranks=tuple(ranks), generation=number.get(lease.generation, 0), parent=parent)

    return WeightsState(
        {
            name: replace(each, current=each.current and number[each.current], version="")
            for name, each in sorted(state.cohorts.items())
        },
        {
            number[old]: replace(each, slabs=tuple(map(slabs, each.slabs)), version="")
            for old, each in state.generations.items()
        },
        {number[old]: renew(each) for old, each in state.leases.items()},
        frozenset((session[who], number[what]) for who, what in state.pins),
        tuple(replace(each, session=session[each.session]) for each in state.waiting),
        frozenset((session[who], slab[what]) for who, what in state.quarantine),
        len(number),
    )


def identity(state: WeightsState) -> Hashable:
    parts = (tuple(part.items()) for part in (state.cohorts, state.generations, state.leases))
    return (*parts, state.pins, state.waiting, state.quarantine)


def need(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


def checked(state: WeightsState, event: WeightsEvent, now: float) -> WeightsState:
    """Take a step, and check its result."""
    after, effects = fsm.step(state, event, now)
    check_state(after)
    check_answers(state, event, now, after, effects)
    check_effects(state, event, after, effects)
    check_slabs(state, event, after, effects)
    return after


def check_state(state: WeightsState) -> None:
    writers = [lease for lease in state.leases.values() if lease.is_rw]
    loads = [lease.key for lease in writers if lease.parent is None]
    cohorts = [lease.cohort for lease in writers]
    need(len(set(cohorts)) == len(cohorts), "two engines of a cohort write")
    need(len(set(loads)) == len(loads), "two engines load the same weights")
    need(all(lease.generation not in state.generations for lease in writers), "a lease writes what is read")
    need(all(number in state.generations for _, number in state.pins), "an uncommitted generation is pinned")
    currents = {cohort.current for cohort in state.cohorts.values() if cohort.current is not None}
    need(currents <= set(state.generations), "a current generation is freed")
    pinned = {number for _, number in state.pins}
    need(set(state.generations) <= currents | pinned, "an unused generation is kept")
    for lease in writers:
        if lease.parent is not None:
            need(state.cohorts[lease.cohort].current == lease.parent, "an update starts from retired weights")
            need(not is_pinned(state, lease.cohort, {lease.parent}), "a cohort has a third generation")
    for each in state.waiting:
        cohort = state.cohorts.get(each.cohort)
        builds = each.cohort in cohorts
        if each.is_update:
            need(builds or is_pinned(state, each.cohort, set()), "an update waits for nothing")
            continue
        need(cohort is None or cohort.current is None, "a session waits for committed weights")
        shared = [g for g in state.generations.values() if g.is_loaded and g.key == each.key]
        need(not shared, "a session waits for weights of another cohort")
        need(builds or each.key in loads or each.mode == "ro", "a session waits although it could load")


def is_pinned(state: WeightsState, cohort: str, others: set[int]) -> bool:
    """Whether a generation that a cohort has made is read although it is retired."""
    currents = others | {each.current for each in state.cohorts.values() if each.current is not None}
    pinned = {number for _, number in state.pins}
    return any(state.generations[number].cohort == cohort for number in pinned - currents)


def check_slabs(
    before: WeightsState, event: WeightsEvent, after: WeightsState, effects: list[WeightsEffect]
) -> None:
    """Each slab is freed once, when nobody has it any more, and no process may still write to it."""
    kinds = DropEffect | ReclaimEffect | ReleaseEffect
    freed = [slab for each in effects if isinstance(each, kinds) for slab in each.slabs]
    need(len(set(freed)) == len(freed), "a slab is freed twice")
    known, had = set(slabs_of(after)), set(slabs_of(before))
    need(not known & set(freed), "a slab in use is freed")
    if isinstance(event, TakeEvent) and not any(isinstance(each, RefuseEffect) for each in effects):
        had |= set(event.slabs)
    need(had == known | set(freed), "a slab is lost")
    if isinstance(event, AbortEvent) and event.is_abandoned and event.lease not in after.leases:
        lease = before.leases[event.lease]
        (rank,) = (each for each in lease.ranks if each.session == event.session)
        need(not set(rank.own) & set(freed), "a slab that may be written is freed")
    if not isinstance(event, GoneEvent):
        need(before.quarantine <= after.quarantine, "a slab leaves the quarantine while its writer lives")
    for each in after.generations.values():
        found = [slab for rank in each.slabs for slab in rank]
        need(len(set(found)) == len(found), "a slab is in two places")
    for lease in after.leases.values():
        committed = after.slabs_in_generations()
        written = {slab for rank in lease.ranks for slab in rank.own}
        need(not lease.is_rw or not written & committed, "what is read is written")
        for number, rank in enumerate(lease.ranks):
            parent = () if lease.parent is None else after.generations[lease.parent].slabs[number]
            need(set(rank.slabs) <= {*rank.own, *parent}, "a rank has sealed the slabs of others")


def check_answers(
    before: WeightsState,
    event: WeightsEvent,
    now: float,
    after: WeightsState,
    effects: list[WeightsEffect],
) -> None:
    """Everybody who asked is answered once, now or later."""
    answers = [each.session for each in effects if isinstance(each, Answer)]
    owed = [each.session for each in before.waiting]
    if not isinstance(event, TickEvent | GoneEvent):
        owed.append(event.session)
    elif isinstance(event, GoneEvent):
        owed = [session for session in owed if session != event.session]
    need(sorted(owed) == sorted([*answers, *(each.session for each in after.waiting)]), "an answer is lost")
    if isinstance(event, TickEvent):
        need(all(each.deadline > now for each in after.waiting), "a session waits too long")


def check_effects(
    before: WeightsState, event: WeightsEvent, after: WeightsState, effects: list[WeightsEffect]
) -> None:
    had = {*before.generations, *(lease.generation for lease in before.leases.values() if lease.is_rw)}
    has = {*after.generations, *(lease.generation for lease in after.leases.values() if lease.is_rw)}
    freed = [each.generation for each in effects if isinstance(each, DropEffect | ReclaimEffect)]
    need(len(set(freed)) == len(freed), "a generation is freed twice")
    need(not set(freed) & has, "a generation in use is freed")
    need(had - has <= set(freed), "a generation's memory is lost")
    asked = {each.session: each for each in before.waiting}
    if isinstance(event, AskEvent):
        asked.setdefault(event.session, event)
    for each in effects:
        if isinstance(each, CommitEffect) and not isinstance(event, AdoptEvent):
            check_commit(before, after, each)
        elif isinstance(each, GrantEffect) and not isinstance(event, JoinEvent):
            check_grant(before, after, asked[each.session], each)
        elif isinstance(each, DropEffect):
            need(each.lease not in after.leases, "a dropped lease is kept")
            others = set(before.leases[each.lease].sessions) if each.lease in before.leases else set()
            told = {*each.sessions, *([] if isinstance(event, TickEvent) else [event.session])}
            need(others <= told, "a rank of a dropped lease is not told")
    if isinstance(event, GoneEvent):
        need(all(session != event.session for session, _ in after.pins), "a gone session pins")
        leases = after.leases.values()
        need(all(lease.rank_of(event.session) is None for lease in leases), "a gone session has a lease")
    if isinstance(event, AdoptEvent):
        check_adoption(before, event, after, effects)
    if isinstance(event, ClaimEvent):
        updates = [each for each in after.leases.values() if each.is_rw and each.parent is not None]
        need(all(each.cohort != event.cohort for each in updates), "an old engine's update goes on")
        need(after.cohorts[event.cohort].epoch > event.seen, "a claimed epoch is not the highest")
    for name, cohort in before.cohorts.items():
        need(after.cohorts[name].epoch >= cohort.epoch, "an epoch falls")


def check_adoption(
    before: WeightsState, event: AdoptEvent, after: WeightsState, effects: list[WeightsEffect]
) -> None:
    had, has = before.cohorts.get(event.cohort, Cohort()), after.cohorts.get(event.cohort, Cohort())
    if had.current is not None and had.adopted_from >= event.epoch:
        need(has == had, "an older engine's weights replace those of a newer one")
        need(any(isinstance(each, RefuseEffect) for each in effects), "an offer is taken and dropped")
        return
    need(has.current is not None and has.current != had.current, "an offer is lost")
    need(has.adopted_from == event.epoch <= has.epoch, "it is not known who has offered what is current")
    need((event.session, has.current) in after.pins, "an engine does not pin what it has offered")
    writers = [each for each in after.leases.values() if each.is_rw and each.cohort == event.cohort]
    # One that was granted by this step has waited, and loads nothing: the cohort has weights.
    need(not writers or writers[0].parent is not None, "a session loads what would replace an offer")


def check_commit(before: WeightsState, after: WeightsState, effect: CommitEffect) -> None:
    if effect.generation in before.generations:  # it got another version
        need(before.cohorts[effect.cohort].epoch == 0, "an engine of another epoch renames")
        others = {name: each for name, each in before.cohorts.items() if name != effect.cohort}
        is_own = others.items() <= after.cohorts.items() and before.generations == after.generations
        need(is_own, "a cohort renames weights for another one")
        return
    lease = next(each for each in before.leases.values() if each.generation == effect.generation)
    need(all(rank.is_sealed for rank in lease.ranks), "an unsealed rank is committed")
    need(None not in [rank.session for rank in lease.ranks], "a rank that is away is committed")
    is_loaded = after.generations[effect.generation].is_loaded
    need(is_loaded == (lease.parent is None), "an update counts as loaded from files")
    if lease.parent is not None:
        parent, found = before.generations[lease.parent].slabs, after.generations[effect.generation].slabs
        for rank, old, new in zip(lease.ranks, parent, found, strict=True):
            pairs = zip(old, new, strict=True)
            need(all(one == other or other in rank.own for one, other in pairs), "a slab is not the parent's")
    pins = {(session, effect.generation) for session in lease.sessions}
    need(pins <= after.pins, "a rank of the loader does not pin what it has loaded")


def check_grant(before: WeightsState, after: WeightsState, asked: AskEvent, effect: GrantEffect) -> None:
    if asked.is_update:
        need(asked.epoch == after.cohorts[asked.cohort].epoch, "an engine of another epoch updates")
        need((asked.session, effect.parent) in before.pins, "an engine updates what it does not serve")
    if effect.mode == "ro":
        generation = after.generations[effect.generation]
        need(asked.mode != "rw", "an engine reads that asked to write")
        need(generation.key == asked.key, "an engine reads other weights")
        had = before.cohorts.get(asked.cohort)
        if had is None or had.current is None:
            need(generation.is_loaded, "a cohort reads another cohort's update")
