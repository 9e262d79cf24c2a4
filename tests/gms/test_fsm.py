"""The weights' lock: every reachable state of small scenarios, random walks of large ones, planted bugs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.gms import fsm
from segue.gms.fsm import WeightsLock
from segue.gms.lock_state import (
    AskEvent,
    BeatEvent,
    ClaimEvent,
    DropEffect,
    GoneEvent,
    GrantEffect,
    JoinEvent,
    RankState,
    ReclaimEffect,
    RefuseEffect,
    SealEvent,
    TickEvent,
    WeightsEvent,
    WeightsState,
)
from tests.gms.exploring import Violation, explore
from tests.gms.lock_model import Scenario, ask, checked, events, identity, renumbered, update

RACE = Scenario(asks=(ask(),))
MODES = Scenario(asks=(ask(), ask("rw"), ask("ro"), ask(key="other")), num_sessions=3)
RANKS = Scenario(asks=(ask(size=2),))
COHORTS = Scenario(asks=(ask(), ask(cohort="b"), ask(cohort="b", key="other")), num_sessions=3)
UPDATES = Scenario(asks=(ask(), update(0), update(1)), max_epoch=1, pins="unpin", num_sessions=2)
SHARED = Scenario(asks=(ask(), ask(cohort="b"), update(0)), num_sessions=2)
SCENARIOS = {
    "race": RACE,
    "modes": MODES,
    "ranks": RANKS,
    "cohorts": COHORTS,
    "updates": UPDATES,
    "shared": SHARED,
}
LARGE = Scenario(
    asks=(
        *(ask(mode) for mode in ("rw", "ro", "rw_or_ro")),
        *(ask(size=2), ask(key="other"), ask(cohort="b"), ask(cohort="b", size=2)),
        *(update(0), update(1), update(2)),
    ),
    num_sessions=6,
    max_epoch=2,
    pins="all",
)


def explored(scenario: Scenario) -> int:
    return explore(
        WeightsState(),
        lambda state: events(scenario, state),
        lambda state, event: renumbered(checked(state, *event)),
        identity,
    )


def walk(choices: Callable[[int], int], num_steps: int) -> None:
    """Take steps at random, each from a fresh choice among the events that can happen."""
    state = WeightsState()
    for _ in range(num_steps):
        possible = list(events(LARGE, state))
        event, now = possible[choices(len(possible))]
        kept = identity(state)
        after = checked(state, event, now)
        assert identity(state) == kept, "a step changes the state that it is given"
        state = renumbered(after)


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_reachable_state_keeps_the_invariants(name: str) -> None:
    assert explored(SCENARIOS[name]) >= 15


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_walks_keep_the_invariants(data: st.DataObject) -> None:
    walk(lambda n: data.draw(st.integers(0, n - 1)), 25)


Patch = pytest.MonkeyPatch
BUGS: dict[str, tuple[str, Callable[[Patch], None]]] = {}


def bug(scenario: str) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Add a bug to the list, with the scenario that must find it."""

    def add(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        BUGS[plant.__name__] = (scenario, plant)
        return plant

    return add


@bug("ranks")
def a_flip_does_not_wait_for_all_ranks(patch: Patch) -> None:
    patch.setattr(fsm, "unsealed", lambda lease: ())


@bug("ranks")
def only_the_end_of_rank_0_ends_a_lease_to_write(patch: Patch) -> None:
    gone = WeightsLock.gone

    def lenient(self: WeightsLock, session: int) -> None:
        held = {number: lease for number, lease in self.state.leases.items() if lease.rank_of(session) == 1}
        gone(self, session)
        self.state.leases |= {number: each.with_rank(1, RankState()) for number, each in held.items()}
        self.effects = [each for each in self.effects if not isinstance(each, DropEffect)]

    patch.setattr(WeightsLock, "gone", lenient)


@bug("updates")
def a_retired_generation_is_freed_while_it_is_read(patch: Patch) -> None:
    def hasty(self: WeightsLock) -> None:
        for number in list(self.retired()):
            del self.state.generations[number]
            self.effects.append(ReclaimEffect(generation=number))

    patch.setattr(WeightsLock, "reclaim", hasty)


@bug("race")
def nobody_is_granted_what_a_dead_loader_gives_up(patch: Patch) -> None:
    apply = WeightsLock.apply

    def deaf(self: WeightsLock, event: WeightsEvent) -> None:
        if isinstance(event, GoneEvent):
            self.answerable = lambda: None  # type: ignore[method-assign]
        apply(self, event)

    patch.setattr(WeightsLock, "apply", deaf)


@bug("race")
def two_engines_load(patch: Patch) -> None:
    patch.setattr(WeightsState, "writer", lambda self, cohort: None)
    patch.setattr(WeightsState, "loader", lambda self, key: None)


@bug("updates")
def an_old_engines_update_goes_on_after_a_takeover(patch: Patch) -> None:
    def meek(self: WeightsLock, event: ClaimEvent) -> None:
        cohort = self.cohort(event.cohort)
        self.state.cohorts[event.cohort] = replace(cohort, epoch=cohort.epoch + 1)
        self.done(event.session, cohort.epoch + 1)

    patch.setattr(WeightsLock, "claim", meek)


@bug("cohorts")
def other_weights_are_read_by_the_same_cohort(patch: Patch) -> None:
    decide = WeightsLock.decide

    def blind(self: WeightsLock, asked: AskEvent) -> Any:
        answer = decide(self, asked)
        is_mismatch = isinstance(answer, RefuseEffect) and answer.code == "mismatch"
        return answer.generation if is_mismatch else answer

    patch.setattr(WeightsLock, "decide", blind)


@bug("shared")
def another_cohorts_update_counts_as_loaded(patch: Patch) -> None:
    init = fsm.WeightsGeneration
    patch.setattr(fsm, "WeightsGeneration", lambda key, is_loaded: init(key=key, is_loaded=True))


@bug("shared")
def a_waiting_session_is_forgotten_when_its_wait_ends(patch: Patch) -> None:
    tick = WeightsLock.tick

    def silent(self: WeightsLock) -> None:
        tick(self)
        self.effects = [each for each in self.effects if not isinstance(each, RefuseEffect)]

    patch.setattr(WeightsLock, "tick", silent)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, plant = BUGS[name]
    plant(monkeypatch)
    with pytest.raises(Violation):
        explored(SCENARIOS[scenario])


def test_a_rank_without_progress_loses_its_engines_lease() -> None:
    state, effects = fsm.step(WeightsState(), replace(ask(size=2), session=1), 0.0)
    (grant,) = effects
    assert isinstance(grant, GrantEffect) and grant.mode == "rw"
    state, _ = fsm.step(state, JoinEvent(session=2, lease=grant.lease, rank=1), 0.0)
    state, _ = fsm.step(state, BeatEvent(session=2, lease=grant.lease, num_bytes=5), 50.0)
    state, _ = fsm.step(state, SealEvent(session=1, lease=grant.lease), 50.0)
    state, effects = fsm.step(state, TickEvent(), 100.0)
    assert effects == []
    state, _ = fsm.step(state, BeatEvent(session=2, lease=grant.lease, num_bytes=5), 105.0)  # no more bytes
    state, effects = fsm.step(state, TickEvent(), 110.0)
    assert effects == [
        DropEffect(generation=grant.generation, lease=grant.lease, sessions=(1, 2), reason="stalled")
    ]


def test_a_rank_that_joins_after_the_others_have_followed_an_update_is_refused() -> None:
    state = WeightsState(
        generations={5: fsm.WeightsGeneration(key="k", is_loaded=False)},
        cohorts={"a": fsm.Cohort(current=5)},
        leases={
            3: fsm.WeightsLease(
                cohort="a", key="k", generation=2, ranks=(RankState(1), RankState()), is_rw=False
            )
        },
        serial=5,
    )
    _, effects = fsm.step(state, JoinEvent(session=2, lease=3, rank=1))
    assert effects == [RefuseEffect(session=2, code="generation")]
