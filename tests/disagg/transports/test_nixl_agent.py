"""How often a thread calls NIXL: it follows from what its calls cost."""

from __future__ import annotations

from segue.disagg.transports.nixl_agent import MIN_PAUSE_S, PollPace

LONGEST_S = 0.01
COLD_S, IDLE_S, MOVING_S = 75e-6, 5e-6, 300e-6  # what a call computes


class Agent:
    """Calls that compute for a while each, and the clock that tells it."""

    def __init__(self, *seconds: float) -> None:
        self.costs = list(seconds)
        self.now = 0.0

    def work(self) -> None:
        self.now += self.costs.pop(0)


def pauses(*costs: float) -> list[float]:
    """Returns the pause after each look, of one call or two, until no costs are left."""
    agent, found = Agent(*costs), []
    pace = PollPace(LONGEST_S, lambda: agent.now)
    while agent.costs:
        pace.call(agent.work)
        found.append(pace.pause_s)
    return found


def test_a_call_that_is_slow_after_a_pause_is_no_sign_of_pages() -> None:
    assert pauses(COLD_S, IDLE_S, COLD_S, IDLE_S) == [LONGEST_S] * 2


def test_while_pages_move_there_is_hardly_a_pause_and_afterwards_it_grows() -> None:
    moving, *after = pauses(MOVING_S, MOVING_S, *[IDLE_S] * 10)
    assert moving == MIN_PAUSE_S
    assert after[:3] == [2 * MIN_PAUSE_S, 4 * MIN_PAUSE_S, 8 * MIN_PAUSE_S] and after[-1] == LONGEST_S


def test_a_job_quickens_the_pace() -> None:
    pace = PollPace(LONGEST_S)
    pace.quicken()
    assert pace.pause_s == MIN_PAUSE_S
