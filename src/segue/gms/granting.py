"""Who gets the weights of the lock: sessions wait in the order in which they came, then are answered.

:func:`segue.gms.fsm.step` settles this after every event, whatever it was.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Literal

from segue.gms.lock_state import (
    AskEvent,
    Cohort,
    DoneEffect,
    GrantEffect,
    RankState,
    RefusalCode,
    RefuseEffect,
    WeightsEffect,
    WeightsLease,
    WeightsState,
)

# A rank that neither joins nor reports progress for so long loses its engine's lease to load.
STALLED_S = 60.0


class WeightsGrants:
    """The state of a step, who waits in it, and how they are answered."""

    def __init__(self, state: WeightsState, now: float) -> None:
        self.state = state
        self.now = now
        self.effects: list[WeightsEffect] = []

    def ask(self, ask: AskEvent) -> None:
        """Queue a request; :meth:`settle` answers it at once if it need not wait."""
        if self.is_busy(ask.session, joins_update=ask.is_update):
            self.refuse(ask.session, "busy")
        else:
            self.state.waiting += (ask,)

    def is_busy(self, session: int, *, joins_update: bool) -> bool:
        """Whether a session waits or has a lease already. An engine that updates may have one to read."""
        leases = (lease for lease in self.state.leases.values() if lease.is_rw or not joins_update)
        if any(lease.rank_of(session) is not None for lease in leases):
            return True
        return any(each.session == session for each in self.state.waiting)

    def settle(self) -> None:
        """Answer every waiting session that can be answered, in the order in which they came."""
        while (found := self.answerable()) is not None:  # each answer may be what another session waits for
            ask, answer = found
            self.state.waiting = tuple(each for each in self.state.waiting if each is not ask)
            if isinstance(answer, RefuseEffect):
                self.effects.append(answer)
            elif answer == "rw":
                self.grant_rw(ask)
            else:
                self.grant_ro(ask, answer)

    def answerable(self) -> tuple[AskEvent, Literal["rw"] | int | RefuseEffect] | None:
        """Return the first waiting session that can be answered, and its answer."""
        answers = ((ask, self.decide(ask)) for ask in self.state.waiting)
        return next(((ask, answer) for ask, answer in answers if answer is not None), None)

    def decide(self, ask: AskEvent) -> Literal["rw"] | int | RefuseEffect | None:
        """Return "rw", the generation to read, a refusal, or None if the session has to wait."""
        state = self.state
        cohort = state.cohorts.get(ask.cohort, Cohort())
        if ask.is_update:
            return self.decide_update(ask, cohort)
        number = state.loaded(ask.key) if cohort.current is None else cohort.current
        if number is None:
            is_loading = state.writer(ask.cohort) is not None or state.loader(ask.key) is not None
            return None if is_loading or ask.mode == "ro" else "rw"
        if ask.mode == "rw":
            return RefuseEffect(session=ask.session, code="committed", generation=number)
        if state.generations[number].key != ask.key:
            return RefuseEffect(session=ask.session, code="mismatch", generation=number)
        return number

    def decide_update(self, ask: AskEvent, cohort: Cohort) -> Literal["rw"] | RefuseEffect | None:
        """Decide about an update. It waits while readers still have a generation that was retired.

        So a cohort has at most two generations of its own, and the one that is written.
        """
        state, current = self.state, cohort.current
        if current is None:
            return RefuseEffect(session=ask.session, code="nothing")
        if ask.epoch != cohort.epoch:
            return RefuseEffect(session=ask.session, code="stale_epoch", generation=current)
        if state.writer(ask.cohort) is not None:
            return None
        if state.generations[current].key != ask.key:
            return RefuseEffect(session=ask.session, code="mismatch", generation=current)
        if (ask.session, current) not in state.pins:
            return RefuseEffect(session=ask.session, code="behind", generation=current)
        return None if self.pinned(ask.cohort) else "rw"

    def pinned(self, cohort: str) -> tuple[int, tuple[int, ...]] | None:
        """Return a retired generation of a cohort that is still read, and the sessions that read it."""
        found = ((number, self.state.readers(number)) for number in self.state.retired(cohort))
        return next(((number, readers) for number, readers in found if readers), None)

    def grant_rw(self, ask: AskEvent) -> None:
        """Let an engine write a new generation; how long an update may take is its engine's affair."""
        parent = self.cohort(ask.cohort).current if ask.is_update else None
        lease, generation = self.number(), self.number()
        due = inf if ask.is_update else self.now + STALLED_S
        self.state.leases[lease] = WeightsLease(
            cohort=ask.cohort,
            key=ask.key,
            generation=generation,
            ranks=(RankState(ask.session, due=due), *(RankState(due=due) for _ in range(ask.size - 1))),
            is_rw=True,
            parent=parent,
        )
        self.granted(ask.session, lease)

    def grant_ro(self, ask: AskEvent, generation: int) -> None:
        """Let an engine read a committed generation."""
        cohort = self.cohort(ask.cohort)
        if cohort.current is None:  # another cohort has loaded it
            version = self.state.generations[generation].version
            self.state.cohorts[ask.cohort] = replace(cohort, current=generation, version=version)
        lease = self.number()
        self.state.leases[lease] = WeightsLease(
            cohort=ask.cohort,
            key=ask.key,
            generation=generation,
            ranks=(RankState(ask.session), *(RankState() for _ in range(ask.size - 1))),
            is_rw=False,
        )
        self.granted(ask.session, lease)

    def granted(self, session: int, number: int) -> None:
        """Pin what a session may read, and tell it."""
        lease = self.state.leases[number]
        if not lease.is_rw:
            self.state.pins |= {(session, lease.generation)}
        effect = GrantEffect(
            session=session,
            lease=number,
            generation=lease.generation,
            mode="rw" if lease.is_rw else "ro",
            parent=lease.parent,
        )
        self.effects.append(effect)

    def cohort(self, name: str) -> Cohort:
        """Return a cohort, which may be new."""
        return self.state.cohorts.get(name, Cohort())

    def number(self) -> int:
        """Return a number for a new lease or generation."""
        self.state.serial += 1
        return self.state.serial

    def refuse(self, session: int, code: RefusalCode) -> None:
        """Answer that what a session asked for is not done."""
        self.effects.append(RefuseEffect(session=session, code=code))

    def done(self, session: int, number: int, missing: tuple[int, ...] = ()) -> None:
        """Answer that what a session asked for is done."""
        self.effects.append(DoneEffect(session=session, number=number, missing=missing))
