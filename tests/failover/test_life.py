from __future__ import annotations

import pytest

from segue.errors import DrainingError, EngineDeadError, EngineHungError, EngineStartError
from segue.failover.life import NEXT_STATES, TIMED, Life, LifeState

GONE = EngineDeadError("gone")
AWAKE = (LifeState.STANDBY, LifeState.WAKING, LifeState.ACTIVE)


def life_of(*states: LifeState) -> Life:
    life = Life()
    for state in states:
        life.advance(state, GONE if state is LifeState.DEAD else None)
    return life


def test_each_state_has_its_trouble() -> None:
    assert isinstance(life_of().trouble, EngineStartError)
    assert life_of(*AWAKE).trouble is None
    assert isinstance(life_of(*AWAKE, LifeState.DRAINING).trouble, DrainingError)
    assert isinstance(life_of(*AWAKE, LifeState.DRAINED).trouble, DrainingError)
    assert life_of(*AWAKE, LifeState.DRAINED, LifeState.ACTIVE).trouble is None
    assert life_of(LifeState.DEAD).trouble is GONE


def test_a_hung_engine_answers_no_call_and_a_draining_one_does() -> None:
    life = life_of(*AWAKE)
    assert life.silence is None
    life.hung = "no heartbeat"
    assert isinstance(life.silence, EngineHungError) and isinstance(life.trouble, EngineHungError)
    life.advance(LifeState.DRAINING)
    assert isinstance(life.silence, EngineHungError) and isinstance(life.trouble, DrainingError)
    life.hung = None
    assert life.silence is None
    life.advance(LifeState.DEAD, GONE)
    assert life.silence is GONE


@pytest.mark.parametrize("state", LifeState)
def test_there_is_no_way_back(state: LifeState) -> None:
    life = life_of(*AWAKE, LifeState.DRAINING, LifeState.DEAD)
    with pytest.raises(ValueError, match="an engine that is DEAD cannot become"):
        life.advance(state, GONE)
    assert life.state is LifeState.DEAD


def test_an_engine_that_starts_cannot_drain() -> None:
    with pytest.raises(ValueError, match="an engine that is INIT cannot become DRAINING"):
        life_of(LifeState.DRAINING)


def walks(limit: int) -> list[list[LifeState]]:
    """Every sequence of states that begins with INIT, of at most so many states."""
    found = [[LifeState.INIT]]
    for walk in found:
        if len(walk) < limit:
            found += [[*walk, state] for state in LifeState if state in NEXT_STATES[walk[-1]]]
    return found


def test_no_walk_serves_without_a_wake_or_comes_back() -> None:
    for walk in walks(9):
        places = {state: walk.index(state) for state in walk}
        for serving in (LifeState.ACTIVE, LifeState.DRAINED, LifeState.DRAINING):
            if serving in places:
                assert places[LifeState.STANDBY] < places[LifeState.WAKING] < places[serving], walk
        for once in (LifeState.INIT, LifeState.STANDBY, LifeState.WAKING, LifeState.DRAINING, LifeState.DEAD):
            assert walk.count(once) <= 1, walk
        if LifeState.DEAD in places:
            assert walk[-1] is LifeState.DEAD
        assert LifeState.DEAD in NEXT_STATES[walk[-1]] or walk[-1] is LifeState.DEAD, "every state can end"


@pytest.mark.parametrize("before", LifeState)
@pytest.mark.parametrize("after", LifeState)
def test_a_life_follows_the_table_and_nothing_else(before: LifeState, after: LifeState) -> None:
    walk = next(walk for walk in walks(6) if walk[-1] is before)
    life = life_of(*walk[1:])
    if after in NEXT_STATES[before]:
        life.advance(after, GONE if after is LifeState.DEAD else None)
        assert life.state is after
        return
    with pytest.raises(ValueError, match=f"an engine that is {before.name} cannot become {after.name}"):
        life.advance(after, GONE if after is LifeState.DEAD else None)
    assert life.state is before


def test_each_transition_is_timed_and_counted() -> None:
    now = 100.0
    life = Life(lambda: now)
    for state in (*AWAKE, LifeState.DRAINED, LifeState.ACTIVE, LifeState.DRAINING):
        now += 2.5
        assert life.advance(state) == 2.5
    assert life.entered[LifeState.ACTIVE] == 2
    assert life.entered[LifeState.DRAINED] == life.entered[LifeState.INIT] == 1


@pytest.mark.parametrize("state", sorted(TIMED, key=lambda state: state.value))
def test_a_state_with_a_deadline_can_be_late(state: LifeState) -> None:
    now = 0.0
    walk = next(walk for walk in walks(6) if walk[-1] is state)
    life = Life(lambda: now)
    for each in walk[1:]:
        life.advance(each, within_s=10.0 if each is state else None)
    now = 10.0
    assert not life.is_late
    now = 10.1
    assert life.is_late
    life.advance(LifeState.DEAD, GONE)
    assert not life.is_late, "the next state has no deadline"


def test_progress_of_the_start_is_the_time_since_the_last_sign() -> None:
    now = 5.0
    life = Life(lambda: now)
    now = 20.0
    assert life.stuck_s == 15.0
    life.note_progress()
    assert life.stuck_s == 0.0
