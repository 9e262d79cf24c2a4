from __future__ import annotations

import pytest

from segue.errors import DrainingError, EngineDeadError, EngineHungError, EngineStartError
from segue.frontend.life import Life, LifeState

GONE = EngineDeadError("gone")


def life_of(*states: LifeState) -> Life:
    life = Life()
    for state in states:
        life.advance(state, GONE if state is LifeState.DEAD else None)
    return life


def test_each_state_has_its_trouble() -> None:
    assert isinstance(life_of().trouble, EngineStartError)
    assert life_of(LifeState.ACTIVE).trouble is None
    assert isinstance(life_of(LifeState.ACTIVE, LifeState.DRAINING).trouble, DrainingError)
    assert isinstance(life_of(LifeState.ACTIVE, LifeState.DRAINED).trouble, DrainingError)
    assert life_of(LifeState.ACTIVE, LifeState.DRAINED, LifeState.ACTIVE).trouble is None
    assert life_of(LifeState.DEAD).trouble is GONE


def test_a_hung_engine_answers_no_call_and_a_draining_one_does() -> None:
    life = life_of(LifeState.ACTIVE)
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
    life = life_of(LifeState.ACTIVE, LifeState.DRAINING, LifeState.DEAD)
    with pytest.raises(ValueError, match="an engine that is DEAD cannot become"):
        life.advance(state, GONE)
    assert life.state is LifeState.DEAD


def test_an_engine_that_starts_cannot_drain() -> None:
    with pytest.raises(ValueError, match="an engine that is INIT cannot become DRAINING"):
        life_of(LifeState.DRAINING)
