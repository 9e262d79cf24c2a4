"""The transitions of the weights' lock: what each event changes, and what has to be done then.

:func:`step` changes nothing that it is given and does no I/O: it returns the next state and effects, which
the server carries out in their order. After every event, whoever can be answered is answered, and what nobody
uses is freed; so no transition has to think of the sessions that wait.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import assert_never

from segue.gms.granting import STALLED_S, WeightsGrants
from segue.gms.lock_state import (
    AbortEvent,
    AdoptEvent,
    AskEvent,
    BeatEvent,
    ClaimEvent,
    CommitEffect,
    DropEffect,
    DropReason,
    FlipEvent,
    GoneEvent,
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
    WeightsGeneration,
    WeightsLease,
    WeightsState,
)


def step(
    state: WeightsState, event: WeightsEvent, now: float = 0.0
) -> tuple[WeightsState, list[WeightsEffect]]:
    """Return the state after an event, and what is to be done, in order."""
    lock = WeightsLock(state.copy(), now)
    lock.apply(event)
    return lock.state, lock.effects


class WeightsLock(WeightsGrants):
    """One step of the lock: applies an event to a state of its own."""

    def apply(self, event: WeightsEvent) -> None:
        """Apply an event; then grant what has become possible, and free what has become unused."""
        match event:
            case AskEvent():
                self.ask(event)
            case JoinEvent():
                self.join(event)
            case TakeEvent():
                self.take(event)
            case BeatEvent():
                self.beat(event)
            case SealEvent():
                self.seal(event)
            case FlipEvent():
                self.flip(event)
            case AbortEvent():
                self.abort(event)
            case RenameEvent():
                self.rename(event)
            case PinEvent():
                self.pin(event)
            case UnpinEvent():
                self.state.pins -= {(event.session, event.generation)}
                self.done(event.session, event.generation)
            case ClaimEvent():
                self.claim(event)
            case AdoptEvent():
                self.adopt(event)
            case GoneEvent():
                self.gone(event.session)
            case TickEvent():
                self.tick()
            case _:
                assert_never(event)
        self.settle()
        self.reclaim()

    def join(self, event: JoinEvent) -> None:
        """Add a rank to a lease; it may be committed meanwhile, and then the rank reads."""
        lease = self.state.leases.get(event.lease)
        if lease is None:
            self.refuse(event.session, "lease")
        elif not 0 <= event.rank < len(lease.ranks) or lease.ranks[event.rank].session is not None:
            self.refuse(event.session, "rank")
        elif self.is_busy(event.session, joins_update=lease.parent is not None):
            self.refuse(event.session, "busy")
        elif not lease.is_rw and lease.generation not in self.state.generations:
            self.refuse(event.session, "generation")  # the engine's other ranks have followed an update
        else:
            due = self.now + STALLED_S if lease.is_rw and lease.parent is None else inf
            rank = replace(lease.ranks[event.rank], session=event.session, due=due)
            self.state.leases[event.lease] = lease.with_rank(event.rank, rank)
            self.granted(event.session, event.lease)

    def take(self, event: TakeEvent) -> None:
        """Note new slabs of a rank. If it is refused, they are still the caller's."""
        if (found := self.writing(event.session, event.lease)) is None:
            return
        lease, number = found
        rank = lease.ranks[number]
        if rank.is_sealed:
            self.refuse(event.session, "slabs")
            return
        rank = replace(rank, own=(*rank.own, *event.slabs))
        self.state.leases[event.lease] = lease.with_rank(number, rank)
        self.done(event.session, lease.generation)

    def beat(self, event: BeatEvent) -> None:
        """Note progress; a beat without it does not keep the lease."""
        if (found := self.writing(event.session, event.lease)) is None:
            return
        lease, number = found
        rank = lease.ranks[number]
        if event.num_bytes > rank.num_bytes and not rank.is_sealed:
            due = inf if lease.parent is not None else self.now + STALLED_S
            rank = replace(rank, num_bytes=event.num_bytes, due=due)
            self.state.leases[event.lease] = lease.with_rank(number, rank)
        self.done(event.session, lease.generation)

    def seal(self, event: SealEvent) -> None:
        """Note that a rank is complete."""
        if (found := self.writing(event.session, event.lease)) is None:
            return
        lease, number = found
        rank = lease.ranks[number]
        parent = None if lease.parent is None else self.state.generations[lease.parent].slabs[number]
        if rank.is_sealed or not is_whole(event.slabs, rank.own, parent):
            self.refuse(event.session, "slabs")
            return
        lease = lease.with_rank(number, replace(rank, is_sealed=True, due=inf, slabs=event.slabs))
        self.state.leases[event.lease] = lease
        self.done(event.session, lease.generation, unsealed(lease))

    def flip(self, event: FlipEvent) -> None:
        """Commit the generation of a lease, and turn the lease into one to read."""
        if (found := self.writing(event.session, event.lease)) is None:
            return
        lease, number = found
        if number != 0:
            self.refuse(event.session, "rank")
        elif missing := unsealed(lease):
            self.effects.append(RefuseEffect(session=event.session, code="unsealed", ranks=missing))
        else:
            self.commit(event.lease, lease, event)
            self.done(event.session, lease.generation)

    def commit(self, number: int, lease: WeightsLease, event: FlipEvent) -> None:
        """Make a lease's generation the current one of its cohort."""
        state, generation = self.state, lease.generation
        cohort = self.cohort(lease.cohort)
        readers = () if cohort.current is None else state.readers(cohort.current)
        state.generations[generation] = WeightsGeneration(
            key=lease.key,
            is_loaded=lease.parent is None,
            cohort=lease.cohort,
            slabs=tuple(rank.slabs for rank in lease.ranks),
            version=event.version,
            model_path=event.model_path,
        )
        state.cohorts[lease.cohort] = replace(cohort, current=generation, version=event.version)
        for old, each in list(state.leases.items()):  # an update replaces the lease by which its engine read
            if not each.is_rw and set(each.sessions) & set(lease.sessions):
                del state.leases[old]
        ranks = tuple(RankState(rank.session) for rank in lease.ranks)
        state.leases[number] = replace(lease, is_rw=False, parent=None, ranks=ranks)
        state.pins |= {(session, generation) for session in lease.sessions}
        others = tuple(session for session in readers if session not in lease.sessions)
        self.effects.append(CommitEffect(cohort=lease.cohort, generation=generation, readers=others))

    def abort(self, event: AbortEvent) -> None:
        """Drop a lease to write, because one of its ranks asks for it."""
        if (found := self.writing(event.session, event.lease)) is None:
            return
        lease, number = found
        if event.is_abandoned:
            written = frozenset((event.session, slab) for slab in lease.ranks[number].own)
            self.state.quarantine |= written
        self.drop(event.lease, "abandoned" if event.is_abandoned else "aborted", event.session)
        self.done(event.session, 0)

    def drop(
        self,
        number: int,
        reason: DropReason,
        session: int | None = None,
    ) -> None:
        """Free the generation of a lease to write; all its ranks but ``session`` are told."""
        lease = self.state.leases.pop(number)
        others = tuple(each for each in lease.sessions if each != session)
        kept = {slab for _, slab in self.state.quarantine}
        freed = tuple(slab for rank in lease.ranks for slab in rank.own if slab not in kept)
        effect = DropEffect(
            generation=lease.generation, lease=number, sessions=others, reason=reason, slabs=freed
        )
        self.effects.append(effect)

    def rename(self, event: RenameEvent) -> None:
        """Give the current generation another version in a cohort, and let its readers there know."""
        cohort = self.cohort(event.cohort)
        if event.generation != cohort.current:
            self.refuse(event.session, "generation")
        elif event.epoch != cohort.epoch:
            self.refuse(event.session, "stale_epoch")
        else:
            state, number = self.state, event.generation
            state.cohorts[event.cohort] = replace(cohort, version=event.version)
            readers = tuple(session for session in state.readers(number) if session != event.session)
            self.effects.append(CommitEffect(cohort=event.cohort, generation=number, readers=readers))
            self.done(event.session, number)

    def pin(self, event: PinEvent) -> None:
        """Let a session read a committed generation."""
        if event.generation in self.state.generations:
            self.state.pins |= {(event.session, event.generation)}
            self.done(event.session, event.generation)
        else:
            self.refuse(event.session, "generation")

    def claim(self, event: ClaimEvent) -> None:
        """Give an engine the highest epoch; an update by an engine of a lower one is over."""
        cohort = self.cohort(event.cohort)
        epoch = max(cohort.epoch, event.seen) + 1
        self.state.cohorts[event.cohort] = replace(cohort, epoch=epoch)
        for number, lease in list(self.state.leases.items()):
            if lease.is_rw and lease.cohort == event.cohort and lease.parent is not None:
                self.drop(number, "stale_epoch")
        self.done(event.session, epoch)

    def adopt(self, event: AdoptEvent) -> None:
        """Take over the weights that an engine reads, unless the cohort has those of a newer engine.

        Whoever loads or updates weights of the cohort meanwhile does so for nothing.
        """
        cohort = self.cohort(event.cohort)
        if cohort.current is not None and event.epoch <= cohort.adopted_from:
            self.refuse(event.session, "other")
            return
        for number, lease in list(self.state.leases.items()):
            if lease.is_rw and lease.cohort == event.cohort:
                self.drop(number, "adopted")
        state, generation = self.state, self.number()
        readers = () if cohort.current is None else state.readers(cohort.current)
        state.generations[generation] = WeightsGeneration(
            key=event.key,
            is_loaded=event.is_loaded,
            cohort=event.cohort,
            slabs=event.slabs,
            version=event.first_version,
            model_path=event.model_path,
        )
        epoch = max(cohort.epoch, event.epoch)
        state.cohorts[event.cohort] = replace(
            cohort, current=generation, version=event.version, epoch=epoch, adopted_from=event.epoch
        )
        state.pins |= {(session, generation) for session in event.sessions}
        others = tuple(session for session in readers if session not in event.sessions)
        self.effects.append(CommitEffect(cohort=event.cohort, generation=generation, readers=others))
        self.done(event.session, generation)

    def gone(self, session: int) -> None:
        """Forget a session: what its engine was writing is dropped, and what it read may be freed."""
        state = self.state
        state.waiting = tuple(each for each in state.waiting if each.session != session)
        state.pins = frozenset(pin for pin in state.pins if pin[0] != session)
        for number, lease in list(state.leases.items()):
            if (rank := lease.rank_of(session)) is None:
                continue
            if lease.is_rw:
                self.drop(number, "gone", session)
            elif len(lease.sessions) == 1:
                del state.leases[number]
            else:
                state.leases[number] = lease.with_rank(rank, RankState())
        if released := sorted(slab for writer, slab in state.quarantine if writer == session):
            state.quarantine = frozenset(each for each in state.quarantine if each[0] != session)
            self.effects.append(ReleaseEffect(slabs=tuple(released)))

    def tick(self) -> None:
        """Refuse those that have waited too long, and drop what makes no progress."""
        for number, lease in list(self.state.leases.items()):
            if lease.is_rw and any(rank.due <= self.now for rank in lease.ranks):
                self.drop(number, "stalled")
        self.settle()  # who can be answered now is not refused
        for ask in self.state.waiting:
            if ask.deadline > self.now:
                continue
            if ask.is_update and (found := self.pinned(ask.cohort)) is not None:
                generation, sessions = found
                refusal = RefuseEffect(
                    session=ask.session, code="pinned", generation=generation, sessions=sessions
                )
                self.effects.append(refusal)
            else:
                self.refuse(ask.session, "timeout")
        self.state.waiting = tuple(ask for ask in self.state.waiting if ask.deadline > self.now)

    def reclaim(self) -> None:
        """Free every generation that is neither pinned nor current."""
        state = self.state
        used = {generation for _, generation in state.pins}
        used |= {cohort.current for cohort in state.cohorts.values() if cohort.current is not None}
        for number in [number for number in state.generations if number not in used]:
            slabs = {slab for rank in state.generations.pop(number).slabs for slab in rank}
            freed = tuple(sorted(slabs - state.slabs_in_generations()))
            self.effects.append(ReclaimEffect(generation=number, slabs=freed))

    def writing(self, session: int, number: int) -> tuple[WeightsLease, int] | None:
        """Return a lease to write and the session's rank in it, or refuse the session."""
        lease = self.state.leases.get(number)
        rank = lease.rank_of(session) if lease is not None and lease.is_rw else None
        if lease is None or rank is None:
            self.refuse(session, "lease")
            return None
        return lease, rank


def unsealed(lease: WeightsLease) -> tuple[int, ...]:
    """Return the ranks of a lease that have not sealed their slabs."""
    return tuple(number for number, rank in enumerate(lease.ranks) if not rank.is_sealed)


def is_whole(slabs: tuple[int, ...], own: tuple[int, ...], parent: tuple[int, ...] | None) -> bool:
    """Return whether the slabs of a rank are its own ones, and the parent's at the places of the others."""
    if parent is None:
        return slabs == own
    if len(slabs) != len(parent) or not set(own) <= set(slabs) or len(set(slabs)) != len(slabs):
        return False
    return all(slab in own or slab == old for slab, old in zip(slabs, parent, strict=True))
