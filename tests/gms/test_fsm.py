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
    AbortEvent,
    AdoptEvent,
    AskEvent,
    BeatEvent,
    ClaimEvent,
    Cohort,
    DropEffect,
    FlipEvent,
    GoneEvent,
    GrantEffect,
    JoinEvent,
    RankState,
    ReclaimEffect,
    RefuseEffect,
    ReleaseEffect,
    RenameEvent,
    SealEvent,
    TakeEvent,
    TickEvent,
    UnpinEvent,
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
SLABS = Scenario(asks=(ask(), update(0)), has_slabs=True, num_sessions=2)
FOLLOWED = replace(SLABS, pins="unpin")
OFFERS = Scenario(asks=(ask(), update(1)), offers=True, max_epoch=1, num_sessions=2)
SHARED = Scenario(asks=(ask(), ask(cohort="b"), update(0)), num_sessions=2)
RENAMES = Scenario(asks=(ask(), ask(cohort="b")), max_epoch=1, num_sessions=2)
SCENARIOS = {
    "race": RACE,
    "modes": MODES,
    "ranks": RANKS,
    "cohorts": COHORTS,
    "updates": UPDATES,
    "shared": SHARED,
    "slabs": SLABS,
    "offers": OFFERS,
    "renames": RENAMES,
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
    has_slabs=True,
    offers=True,
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


@pytest.mark.slow
def test_every_reachable_state_of_updates_that_others_follow_keeps_the_invariants() -> None:
    assert explored(FOLLOWED) >= 1000


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


@bug("offers")
def whoever_offers_last_is_believed(patch: Patch) -> None:
    adopt = WeightsLock.adopt

    def credulous(self: WeightsLock, event: AdoptEvent) -> None:
        cohort = self.cohort(event.cohort)
        self.state.cohorts[event.cohort] = replace(cohort, adopted_from=-1)
        adopt(self, event)

    patch.setattr(WeightsLock, "adopt", credulous)


@bug("offers")
def a_load_goes_on_beside_an_offer(patch: Patch) -> None:
    adopt = WeightsLock.adopt

    def lenient(self: WeightsLock, event: AdoptEvent) -> None:
        held = {number: lease for number, lease in self.state.leases.items() if lease.is_rw}
        adopt(self, event)
        self.state.leases |= held
        self.effects = [each for each in self.effects if not isinstance(each, DropEffect)]

    patch.setattr(WeightsLock, "adopt", lenient)


@bug("offers")
def an_engine_does_not_keep_what_it_offers(patch: Patch) -> None:
    adopt = WeightsLock.adopt

    def careless(self: WeightsLock, event: AdoptEvent) -> None:
        pins = self.state.pins
        adopt(self, event)
        self.state.pins = pins

    patch.setattr(WeightsLock, "adopt", careless)


@bug("updates")
def a_retired_generation_is_freed_while_it_is_read(patch: Patch) -> None:
    def hasty(self: WeightsLock) -> None:
        for number in self.state.retired("a"):
            del self.state.generations[number]
            self.effects.append(ReclaimEffect(generation=number, slabs=()))

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
    patch.setattr(fsm, "WeightsGeneration", lambda **fields: init(**{**fields, "is_loaded": True}))


@bug("shared")
def a_waiting_session_is_forgotten_when_its_wait_ends(patch: Patch) -> None:
    tick = WeightsLock.tick

    def silent(self: WeightsLock) -> None:
        tick(self)
        self.effects = [each for each in self.effects if not isinstance(each, RefuseEffect)]

    patch.setattr(WeightsLock, "tick", silent)


@bug("slabs")
def a_generation_takes_its_parents_slabs_with_it(patch: Patch) -> None:
    patch.setattr(WeightsState, "slabs_in_generations", lambda self: set())


@bug("slabs")
def what_an_abandoned_receiver_writes_to_is_freed(patch: Patch) -> None:
    abort = WeightsLock.abort
    patch.setattr(WeightsLock, "abort", lambda self, event: abort(self, replace(event, is_abandoned=False)))


@bug("slabs")
def a_rank_seals_other_slabs_than_its_own_and_its_parents(patch: Patch) -> None:
    patch.setattr(fsm, "is_whole", lambda slabs, own, parent: True)


@bug("slabs")
def a_third_generation_is_granted(patch: Patch) -> None:
    patch.setattr(WeightsLock, "pinned", lambda self, cohort: None)


@bug("updates")
def an_old_engine_renames_the_weights(patch: Patch) -> None:
    rename = WeightsLock.rename

    def careless(self: WeightsLock, event: RenameEvent) -> None:
        rename(self, replace(event, epoch=self.cohort(event.cohort).epoch))

    patch.setattr(WeightsLock, "rename", careless)


@bug("renames")
def a_cohort_renames_the_weights_of_another_one(patch: Patch) -> None:
    rename = WeightsLock.rename

    def for_all(self: WeightsLock, event: RenameEvent) -> None:
        rename(self, event)
        if not isinstance(self.effects[-1], RefuseEffect):
            cohorts = self.state.cohorts
            self.state.cohorts |= {
                name: replace(each, version=event.version)
                for name, each in cohorts.items()
                if each.current == event.generation
            }

    patch.setattr(WeightsLock, "rename", for_all)


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
    state, _ = fsm.step(state, SealEvent(session=1, lease=grant.lease, slabs=()), 50.0)
    state, effects = fsm.step(state, TickEvent(), 100.0)
    assert effects == []
    state, _ = fsm.step(state, BeatEvent(session=2, lease=grant.lease, num_bytes=5), 105.0)  # no more bytes
    state, effects = fsm.step(state, TickEvent(), 110.0)
    assert effects == [
        DropEffect(
            generation=grant.generation, lease=grant.lease, sessions=(1, 2), reason="stalled", slabs=()
        )
    ]


def committed(version: str = "0") -> WeightsState:
    """Session 1 has loaded a generation of two slabs, 1 and 2."""
    return after(
        WeightsState(),
        replace(ask(), session=1),
        TakeEvent(session=1, lease=1, slabs=(1, 2)),
        SealEvent(session=1, lease=1, slabs=(1, 2)),
        FlipEvent(session=1, lease=1, version=version),
    )


def after(state: WeightsState, *steps: WeightsEvent, now: float = 0.0) -> WeightsState:
    for event in steps:
        state = checked(state, event, now)
    return state


def test_an_update_shares_what_it_does_not_touch_and_may_take_for_ever() -> None:
    state = after(
        committed(), replace(update(0), session=1), TakeEvent(session=1, lease=3, slabs=(3,)), TickEvent()
    )
    state = after(state, TickEvent(), now=1e9)  # a trainer sends when it likes
    flip = FlipEvent(session=1, lease=3, version="1", model_path="/new")
    state = after(state, SealEvent(session=1, lease=3, slabs=(1, 3)), flip)
    current = state.generations[4]
    assert (current.slabs, current.version, current.model_path) == (((1, 3),), "1", "/new")
    _, effects = fsm.step(state, UnpinEvent(session=1, generation=2))
    assert ReclaimEffect(generation=2, slabs=(2,)) in effects, "the other slab is the new generation's too"


def test_an_update_waits_for_readers_of_retired_weights_and_then_names_them() -> None:
    state = after(committed(), replace(ask("ro"), session=2), replace(update(0), session=1))
    (lease,) = (number for number, each in state.leases.items() if each.is_rw)
    state = after(state, SealEvent(session=1, lease=lease, slabs=(1, 2)), FlipEvent(session=1, lease=lease))
    state = after(state, UnpinEvent(session=1, generation=2), replace(update(0), session=1))
    assert state.waiting, "session 2 still reads the first generation"
    _, effects = fsm.step(state, TickEvent(), 2.0)
    assert effects == [RefuseEffect(session=1, code="pinned", generation=2, sessions=(2,))]
    _, effects = fsm.step(state, UnpinEvent(session=2, generation=2), 0.5)
    assert any(isinstance(each, GrantEffect) and each.mode == "rw" for each in effects)


def test_what_an_abandoned_receiver_may_write_to_is_kept_until_its_process_has_gone() -> None:
    state = after(committed(), replace(update(0), session=1), TakeEvent(session=1, lease=3, slabs=(3,)))
    state, effects = fsm.step(state, AbortEvent(session=1, lease=3, is_abandoned=True))
    (drop,) = (each for each in effects if isinstance(each, DropEffect))
    assert (drop.slabs, drop.reason) == ((), "abandoned")
    _, effects = fsm.step(state, GoneEvent(session=1))
    assert ReleaseEffect(slabs=(3,)) in effects


def test_a_rank_that_joins_after_the_others_have_followed_an_update_is_refused() -> None:
    state = WeightsState(
        generations={5: fsm.WeightsGeneration(key="k", is_loaded=False, cohort="a", slabs=((), ()))},
        cohorts={"a": Cohort(current=5)},
        leases={
            3: fsm.WeightsLease(
                cohort="a", key="k", generation=2, ranks=(RankState(1), RankState()), is_rw=False
            )
        },
        serial=5,
    )
    _, effects = fsm.step(state, JoinEvent(session=2, lease=3, rank=1))
    assert effects == [RefuseEffect(session=2, code="generation")]
