"""The truth table of the probes: every state, with everything else well or not."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from segue.failover.life import LifeState
from segue.failover.probes import (
    PARKED_SILENCE_S,
    PROGRESS_S,
    Vitals,
    why_not_live,
    why_not_ready,
    why_not_started,
)

HANG_S = 30.0
STARTED = set(LifeState) - {LifeState.INIT, LifeState.DEAD}


def every_condition() -> list[Vitals]:
    """Each state with each combination of what can be wrong."""
    silences = (0.0, PARKED_SILENCE_S + 0.1, HANG_S + 0.1)
    stuck = (None, 0.0, PROGRESS_S + 0.1)
    facts = product(LifeState, (False, True), silences, stuck, (False, True), ("", "poisoned"))
    return [
        Vitals(
            state=state,
            is_late=late,
            silent_s=silent,
            stuck_s=progress,
            is_healthy=healthy,
            trouble=trouble,
            hang_timeout_s=HANG_S,
        )
        for state, late, silent, progress, healthy, trouble in facts
    ]


@pytest.mark.parametrize("state", LifeState)
def test_each_state_answers_by_its_own_row(state: LifeState) -> None:
    for vitals in every_condition():
        if vitals.state is not state:
            continue
        live = {
            LifeState.INIT: vitals.stuck_s == 0.0,
            LifeState.STANDBY: vitals.silent_s <= PARKED_SILENCE_S,
            LifeState.WAKING: not vitals.is_late,
            LifeState.ACTIVE: vitals.is_healthy and vitals.silent_s <= HANG_S,
            LifeState.DRAINED: vitals.is_healthy and vitals.silent_s <= HANG_S,
            LifeState.DRAINING: not vitals.is_late,
            LifeState.DEAD: False,
        }[state]
        assert (why_not_live(vitals) is None) == live, vitals
        assert (why_not_started(vitals) is None) == (state in STARTED), vitals
        is_ready = state is LifeState.ACTIVE and not vitals.trouble
        assert (why_not_ready(vitals) is None) == is_ready, vitals


def test_a_reason_says_what_is_wrong() -> None:
    vitals = Vitals(state=LifeState.STANDBY, silent_s=7.25, hang_timeout_s=HANG_S)
    assert why_not_live(vitals) == "a worker rank has not answered for 7.2 s"
    assert why_not_ready(vitals) == "the engine is in the state standby"
    assert why_not_live(replace(vitals, state=LifeState.WAKING, is_late=True)) == (
        "the wake takes longer than --wake-timeout-s"
    )
