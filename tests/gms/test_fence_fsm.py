"""The fence: every reachable state of a small scenario, random walks, planted bugs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.gms import fence_fsm
from segue.gms.fence_fsm import (
    EndedEvent,
    FenceAnswer,
    FenceEvent,
    FenceGoneEvent,
    FenceState,
    FenceTickEvent,
    FencingEvent,
    KillProcess,
    SeenEvent,
    ServesEvent,
    WatchedProcess,
    fence_step,
)
from tests.gms.exploring import Violation, explore

DEADLINE, LATE = 1.0, 9.0
MAX_EPOCH = 3
ENGINES = ("a", "b", "c")  # the process of an engine has the number of its place here


@dataclass(frozen=True, slots=True)
class World:
    """The fence, and what is true of the processes."""

    fence: FenceState = field(default_factory=FenceState)
    living: frozenset[int] = frozenset()
    epochs: tuple[int, ...] = (0,) * len(ENGINES)  # that the engines' processes have claimed
    owed: frozenset[int] = frozenset()  # sessions that wait


def need(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


def events(world: World) -> Iterator[tuple[FencingEvent, float]]:
    for number, engine in enumerate(ENGINES):
        if number not in world.living:
            yield SeenEvent(process=number, cohort="x", engine=engine), 0.0
            continue
        yield EndedEvent(process=number), 0.0
        newest = max(world.epochs)
        if not world.epochs[number] and newest < MAX_EPOCH:
            yield ServesEvent(cohort="x", engine=engine, epoch=newest + 1), 0.0
        if world.epochs[number]:
            for kills in (False, True):
                fence = FenceEvent(
                    session=number,
                    cohort="x",
                    engine=engine,
                    below=world.epochs[number],
                    kills=kills,
                    deadline=DEADLINE,
                )
                yield fence, 0.0
                yield replace(fence, cohort="other"), 0.0
        yield FenceGoneEvent(session=number), 0.0
    yield FenceTickEvent(), 0.0
    yield FenceTickEvent(), LATE


def checked(world: World, event: FencingEvent, now: float) -> World:
    state, effects = fence_step(world.fence, event, now)
    living, epochs, owed = set(world.living), list(world.epochs), set(world.owed)
    match event:
        case SeenEvent():
            living.add(event.process)
            epochs[event.process] = 0
        case EndedEvent():
            living.discard(event.process)
        case ServesEvent():
            epochs[ENGINES.index(event.engine)] = event.epoch
        case FenceEvent():
            owed.add(event.session)
        case FenceGoneEvent():
            owed.discard(event.session)
            if not epochs[event.session]:
                living.discard(event.session)  # it is of no interest, whether it lives or not
    asked = {each.session: each for each in world.fence.waiting}
    if isinstance(event, FenceEvent):
        asked[event.session] = event
    for effect in effects:
        match effect:
            case KillProcess(process=number):
                need(isinstance(event, FenceEvent) and event.kills, "a process is killed that nobody fences")
                assert isinstance(event, FenceEvent)
                need(number in living, "an ended process is killed")
                need(epochs[number] > 0, "an engine that stands by is killed")
                need(epochs[number] < event.below, "a newer engine is killed")
                need(event.cohort == "x", "an engine of another cohort is killed")
            case FenceAnswer(session=session, alive=alive):
                need(session in owed, "a session is answered that does not wait")
                owed.discard(session)
                fence = asked[session]
                need(set(alive) == older(living, epochs, fence), "an answer does not say who is alive")
                need(not alive or now >= fence.deadline, "a fence opens while an older engine runs")
    need({each.session for each in state.waiting} == owed, "an answer is lost")
    if isinstance(event, FenceEvent) and event.kills:
        killed = {each.process for each in effects if isinstance(each, KillProcess)}
        need(killed == older(living, epochs, event), "an older engine is spared")
    if now == LATE:
        need(not state.waiting, "a session waits too long")
    known = {
        number: WatchedProcess("x", ENGINES[number], epochs[number] if number in living else 0)
        for number in living
    }
    need(state.processes == known, "a process is forgotten, or has a wrong epoch")
    return World(state, frozenset(living), tuple(epochs), frozenset(owed))


def older(living: set[int], epochs: list[int], fence: FenceEvent) -> set[int]:
    """The processes that a fence is for, by what is true of them."""
    others = {number for number in living if ENGINES[number] != fence.engine and fence.cohort == "x"}
    return {number for number in others if 0 < epochs[number] < fence.below}


def identity(world: World) -> Hashable:
    processes = tuple(sorted(world.fence.processes.items(), key=lambda each: each[0]))
    return processes, world.fence.waiting, world.epochs


def explored() -> int:
    return explore(World(), events, lambda world, event: checked(world, *event), identity)


def test_every_reachable_state_keeps_the_invariants() -> None:
    assert explored() > 100


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_walks_keep_the_invariants(data: st.DataObject) -> None:
    world = World()
    for _ in range(30):
        possible = list(events(world))
        event, now = possible[data.draw(st.integers(0, len(possible) - 1))]
        world = checked(world, event, now)


def test_a_process_that_tells_its_epoch_keeps_it_when_its_engine_claims_another_one() -> None:
    """A service that was started again hears of what it has lost in any order."""
    state, _ = fence_step(FenceState(), SeenEvent(process=1, cohort="x", engine="a", epoch=2))
    state, _ = fence_step(state, SeenEvent(process=2, cohort="x", engine="a"))
    state, _ = fence_step(state, ServesEvent(cohort="x", engine="a", epoch=5))
    assert [each.epoch for each in state.processes.values()] == [2, 5]
    ask = FenceEvent(session=1, cohort="x", engine="a", below=5, kills=True, deadline=DEADLINE)
    assert fence_step(state, ask)[1] == [FenceAnswer(1, ())], "no engine fences itself"


Patch = pytest.MonkeyPatch
BUGS: dict[str, Callable[[Patch], None]] = {}


def bug(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    BUGS[plant.__name__] = plant
    return plant


def planted(patch: Patch, wrong: Callable[[WatchedProcess, FenceEvent], bool]) -> None:
    """Have the fence wait for other processes than it should."""
    patch.setattr(
        fence_fsm,
        "before",
        lambda processes, fence: tuple(n for n, each in processes.items() if wrong(each, fence)),
    )


@bug
def engines_that_stand_by_are_fenced(patch: Patch) -> None:
    planted(patch, lambda each, fence: each.engine != fence.engine and each.epoch < fence.below)


@bug
def engines_of_other_cohorts_are_fenced(patch: Patch) -> None:
    planted(patch, lambda each, fence: 0 < each.epoch < fence.below)


@bug
def newer_engines_are_fenced(patch: Patch) -> None:
    planted(patch, lambda each, fence: each.engine != fence.engine and each.epoch > 0)


@bug
def nobody_is_fenced(patch: Patch) -> None:
    planted(patch, lambda each, fence: False)


def wrapped(patch: Patch, change: Callable[[FencingEvent], FencingEvent]) -> None:
    step = fence_step
    patch.setitem(globals(), "fence_step", lambda state, event, now=0.0: step(state, change(event), now))


@bug
def the_wait_has_no_end(patch: Patch) -> None:
    def patient(event: FencingEvent) -> FencingEvent:
        return replace(event, deadline=float("inf")) if isinstance(event, FenceEvent) else event

    wrapped(patch, patient)


@bug
def a_gone_session_is_still_answered(patch: Patch) -> None:
    wrapped(patch, lambda event: FenceTickEvent() if isinstance(event, FenceGoneEvent) else event)


@bug
def the_end_of_a_process_is_missed(patch: Patch) -> None:
    wrapped(patch, lambda event: FenceTickEvent() if isinstance(event, EndedEvent) else event)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: Patch) -> None:
    BUGS[name](monkeypatch)
    with pytest.raises(Violation):
        explored()
