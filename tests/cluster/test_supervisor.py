"""The supervisor as tables, with a clock that the tests set."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import product

import pytest

from segue.children import RestartRule
from segue.cluster.supervisor import (
    TABLE,
    Child,
    ChildAction,
    ChildCommand,
    ChildEvent,
    ChildState,
    Supervisor,
    SupervisorRules,
)

WAITING, STARTING, READY, DRAINING, STOPPING, ENDED = ChildState
DUE, PROBED, DIED, EXITED, UNHEALTHY, DRAIN, STOP = ChildEvent
NOTHING, START, TERM, INTERRUPT, KILL = ChildAction
RULES = SupervisorRules(
    drain_s=10.0, stop_s=5.0, restart=RestartRule(backoff_s=0.5, max_backoff_s=4.0, steady_s=60.0)
)

# state: what each event leads to; events that are left out change nothing.
EXPECTED = {
    WAITING: {DUE: (STARTING, START), DRAIN: (ENDED, NOTHING), STOP: (ENDED, NOTHING)},
    STARTING: {
        PROBED: (READY, NOTHING),
        DIED: (WAITING, NOTHING),
        EXITED: (ENDED, NOTHING),
        UNHEALTHY: (STARTING, KILL),
        DRAIN: (DRAINING, TERM),
        STOP: (STOPPING, INTERRUPT),
    },
    READY: {
        DIED: (WAITING, NOTHING),
        EXITED: (ENDED, NOTHING),
        UNHEALTHY: (READY, KILL),
        DRAIN: (DRAINING, TERM),
        STOP: (STOPPING, INTERRUPT),
    },
    DRAINING: {EXITED: (ENDED, NOTHING), STOP: (STOPPING, INTERRUPT)},
    STOPPING: {EXITED: (ENDED, NOTHING), DUE: (STOPPING, KILL)},
    ENDED: {},
}


@pytest.mark.parametrize(
    ("state", "event"), list(product(ChildState, ChildEvent)), ids=lambda each: each.name
)
def test_each_row_of_the_table(state: ChildState, event: ChildEvent) -> None:
    assert TABLE.get((state, event)) == EXPECTED[state].get(event)


def test_every_state_can_end_and_every_process_is_waited_for() -> None:
    running = {STARTING, READY, DRAINING, STOPPING}
    for (state, event), (new, action) in TABLE.items():
        assert (state not in running and new in running) == (action is START)
        if state in running and new not in running:
            assert event in (DIED, EXITED)
    for state in running:
        assert TABLE[state, EXITED] == (ENDED, NOTHING)


# --- one child ---


def started(*names: str, at: float = 0.0) -> Supervisor:
    """A supervisor whose children, of stages by their order, were started."""
    supervisor = Supervisor({name: stage for stage, name in enumerate(names)}, RULES, at)
    assert supervisor.advance(at) == [ChildCommand(name, START) for name in names]
    return supervisor


def ready(*names: str, at: float = 0.0) -> Supervisor:
    supervisor = started(*names, at=at)
    for name in names:
        assert supervisor.probed(name, at) == []
    return supervisor


def child(supervisor: Supervisor, name: str) -> Child:
    return supervisor.children[name]


def test_it_is_ready_once_all_children_are() -> None:
    supervisor = started("a", "b")
    supervisor.probed("a", 1.0)
    assert not supervisor.is_ready
    supervisor.probed("b", 2.0)
    assert supervisor.is_ready and supervisor.wake_at is None


def test_a_child_that_dies_is_started_again_at_once() -> None:
    supervisor = ready("a", "b")
    assert supervisor.exited("a", "by signal SIGKILL", 7.0) == []
    assert not supervisor.is_ready and supervisor.wake_at == 7.0
    assert supervisor.advance(7.0) == [("a", START)]
    assert supervisor.advance(7.0) == []
    supervisor.probed("a", 8.0)
    assert supervisor.is_ready


def test_pauses_before_restarts_grow_to_a_limit() -> None:
    supervisor, now, pauses = ready("a"), 0.0, []
    for _ in range(7):
        supervisor.exited("a", "with exit code 1", now)
        due = supervisor.wake_at
        assert due is not None
        assert due == now or supervisor.advance(due - 0.01) == []
        assert supervisor.advance(due) == [("a", START)]
        pauses.append(due - now)
        now = due + 1.0
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0]


def test_a_child_can_have_a_pause_before_every_restart() -> None:
    supervisor, now, pauses = Supervisor({"a": 0}, RULES, 0.0, {"a": 3.0}), 0.0, []
    for _ in range(6):
        assert supervisor.advance(now) == [("a", START)]
        supervisor.probed("a", now)
        supervisor.exited("a", "by signal SIGKILL", now)
        pauses.append((supervisor.wake_at or 0.0) - now)
        now += pauses[-1]
    assert pauses == [3.0, 3.0, 3.0, 3.0, 4.0, 4.0]


def test_a_thousand_deaths_are_no_overflow() -> None:
    supervisor, now = ready("a"), 0.0
    for _ in range(2000):
        supervisor.exited("a", "with exit code 1", now)
        now = supervisor.wake_at or 0.0
        supervisor.advance(now)
    assert child(supervisor, "a").num_deaths == 2000


@pytest.mark.parametrize(("lasted", "pause"), [(59.9, 0.5), (60.0, 0.0)])
def test_a_steady_time_forgets_earlier_deaths(lasted: float, pause: float) -> None:
    supervisor = ready("a")
    supervisor.exited("a", "with exit code 1", 99.0)
    supervisor.advance(99.0)
    supervisor.probed("a", 100.0)
    supervisor.exited("a", "with exit code 1", 100.0 + lasted)
    assert supervisor.wake_at == 100.0 + lasted + pause


def test_a_child_must_be_ready_for_as_long_as_its_start_took() -> None:
    for lasted, pause in ((99.9, 0.5), (100.0, 0.0)):
        supervisor = ready("a")
        supervisor.exited("a", "with exit code 1", 0.0)
        supervisor.advance(0.0)
        supervisor.probed("a", 100.0)
        supervisor.exited("a", "with exit code 1", 100.0 + lasted)
        assert supervisor.wake_at == 100.0 + lasted + pause


def test_a_kill_by_the_probes_does_not_shorten_the_time_that_a_child_was_ready() -> None:
    supervisor = ready("a")
    supervisor.exited("a", "with exit code 1", 0.0)
    supervisor.advance(0.0)
    supervisor.probed("a", 1.0)
    supervisor.unhealthy("a", 100.0)
    supervisor.exited("a", "by signal SIGKILL", 100.1)
    assert supervisor.wake_at == 100.1


def test_five_hundred_takeovers_have_no_growing_pauses() -> None:
    """Two engines are killed in turn, as soon as the other one stands by: neither is in a crash loop."""
    names, now, pauses = ["a", "b"], 0.0, []
    supervisor = Supervisor(dict.fromkeys(names, 0), SupervisorRules(drain_s=10.0), now, {"a": 3.0, "b": 3.0})
    supervisor.advance(now)
    for name in names:
        supervisor.probed(name, now := now + 4.0)
    for number in range(500):
        victim = names[number % 2]
        supervisor.exited(victim, "by signal SIGKILL", now)
        due = supervisor.wake_at
        assert due is not None
        pauses.append(due - now)
        supervisor.advance(due)
        supervisor.probed(victim, now := due + 4.0)
    assert set(pauses) == {3.0}


def test_time_spent_starting_is_not_steady() -> None:
    supervisor = ready("a")
    for _ in range(2):
        supervisor.exited("a", "with exit code 1", 0.0)
        supervisor.advance(1.0)
    supervisor.exited("a", "with exit code 1", 1000.0)
    assert supervisor.wake_at == 1001.0


def test_a_child_that_its_probes_want_killed_is_killed_and_started_again() -> None:
    supervisor = ready("a", "b")
    assert supervisor.unhealthy("a", 5.0) == [("a", KILL)]
    assert supervisor.exited("a", "by signal SIGKILL", 5.1) == []
    assert supervisor.advance(5.1) == [("a", START)]


def test_a_child_that_never_starts_in_time_ends_everything() -> None:
    supervisor = started("a")
    assert supervisor.unhealthy("a", 7200.0) == [("a", KILL)]
    supervisor.exited("a", "by signal SIGKILL", 7200.1)
    assert supervisor.failure == "a ended by signal SIGKILL before it was ready; see its log above"


def test_a_child_that_is_to_end_has_no_probes() -> None:
    supervisor = ready("a", "door")
    supervisor.drain(1.0)
    assert supervisor.unhealthy("door", 2.0) == [] and child(supervisor, "door").state is DRAINING


# --- the end ---


def test_a_child_that_was_never_ready_ends_everything() -> None:
    supervisor = started("a", "b")
    supervisor.probed("b", 1.0)
    assert supervisor.exited("a", "with exit code 1", 2.0) == [("b", INTERRUPT)]
    assert supervisor.failure == "a ended with exit code 1 before it was ready; see its log above"
    supervisor.exited("b", "with exit code 0", 3.0)
    assert supervisor.is_over and supervisor.advance(100.0) == []


def test_a_child_that_was_ready_once_may_fail_at_later_starts() -> None:
    supervisor = ready("a")
    supervisor.exited("a", "with exit code 1", 1.0)
    supervisor.advance(1.0)
    supervisor.exited("a", "with exit code 1", 2.0)
    assert supervisor.failure is None and child(supervisor, "a").state is WAITING


def test_a_drain_asks_one_stage_after_the_other() -> None:
    supervisor = Supervisor({"a": 0, "b": 0, "door": 1}, RULES, 0.0)
    supervisor.advance(0.0)
    for name in ("a", "b", "door"):
        supervisor.probed(name, 0.0)
    assert supervisor.drain(1.0) == [("door", TERM)] and supervisor.wake_at == 11.0
    assert supervisor.advance(5.0) == []
    assert supervisor.exited("door", "with exit code 0", 6.0) == [("a", TERM), ("b", TERM)]
    assert supervisor.exited("a", "with exit code 0", 7.0) == []
    assert not supervisor.is_over
    assert supervisor.exited("b", "with exit code 0", 8.0) == []
    assert supervisor.is_over and supervisor.wake_at is None and supervisor.failure is None


def test_nothing_is_started_again_during_a_drain() -> None:
    supervisor = ready("a", "door")
    supervisor.drain(1.0)
    assert supervisor.exited("a", "by signal SIGKILL", 2.0) == []
    assert child(supervisor, "a").state is ENDED
    assert supervisor.exited("door", "with exit code 0", 3.0) == []
    assert supervisor.is_over


def test_a_child_without_a_process_ends_when_a_drain_begins() -> None:
    supervisor = ready("a", "door")
    supervisor.exited("a", "with exit code 1", 1.0)
    assert supervisor.drain(1.0) == [("door", TERM)]
    assert child(supervisor, "a").state is ENDED and supervisor.advance(2.0) == []


def test_a_drain_without_any_process_is_over() -> None:
    supervisor = Supervisor({"a": 0}, RULES, 0.0)
    assert supervisor.drain(0.0) == [] and supervisor.is_over and supervisor.wake_at is None


def test_children_that_are_not_ready_are_asked_to_end_too() -> None:
    assert started("a").drain(1.0) == [("a", TERM)]
    assert started("a").stop(1.0) == [("a", INTERRUPT)]


def test_a_child_that_ends_as_it_was_asked_to_has_not_failed() -> None:
    supervisor = started("a")
    supervisor.drain(1.0)
    supervisor.exited("a", "with exit code 0", 2.0)
    assert supervisor.failure is None and supervisor.is_over


def test_a_drain_that_takes_too_long_is_cut_short() -> None:
    supervisor = ready("a", "door")
    supervisor.drain(1.0)
    assert supervisor.advance(10.9) == []
    assert supervisor.advance(11.0) == [("a", INTERRUPT), ("door", INTERRUPT)]
    assert supervisor.wake_at == 16.0
    assert supervisor.advance(16.0) == [("a", KILL), ("door", KILL)]
    assert supervisor.wake_at is None


def test_a_second_drain_changes_nothing() -> None:
    supervisor = ready("a")
    supervisor.drain(1.0)
    assert supervisor.drain(5.0) == [] and supervisor.wake_at == 11.0


def test_a_stop_ends_all_at_once_and_kills_what_stays() -> None:
    supervisor = ready("a", "door")
    assert supervisor.stop(1.0) == [("a", INTERRUPT), ("door", INTERRUPT)]
    assert supervisor.exited("door", "with exit code 0", 2.0) == []
    assert supervisor.advance(5.9) == []
    assert supervisor.advance(6.0) == [("a", KILL)]
    assert supervisor.advance(60.0) == []
    supervisor.exited("a", "by signal SIGKILL", 60.0)
    assert supervisor.is_over


def test_a_stop_during_a_drain_is_at_once_too() -> None:
    supervisor = ready("a", "door")
    supervisor.drain(1.0)
    assert supervisor.stop(2.0) == [("a", INTERRUPT), ("door", INTERRUPT)]
    assert supervisor.wake_at == 7.0


def test_a_second_stop_does_not_put_off_the_kill() -> None:
    supervisor = ready("a")
    supervisor.stop(1.0)
    assert supervisor.stop(5.0) == [] and supervisor.wake_at == 6.0


def test_a_probe_that_answers_late_does_not_revive_a_child() -> None:
    supervisor = started("a")
    supervisor.stop(1.0)
    assert supervisor.probed("a", 2.0) == [] and child(supervisor, "a").state is STOPPING


# --- any order of events ---


@dataclass
class World:
    """Processes that obey the supervisor's commands, more or less."""

    supervisor: Supervisor
    running: set[str] = field(default_factory=set)
    killed: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)

    def obey(self, commands: list[ChildCommand]) -> None:
        for name, action in commands:
            if action is START:
                assert name not in self.running, "two processes of one child"
                assert not self.supervisor.is_ending, "a start while all is to end"
                self.running.add(name)
                continue
            assert name in self.running, "a signal to no process"
            if action is TERM:
                others = {each for each in self.running if child(self.supervisor, each).stage}
                assert child(self.supervisor, name).stage or not others, "a lower stage ends first"
            self.asked.add(name)
            if action is KILL:
                self.killed.add(name)

    def exit(self, name: str, now: float) -> None:
        self.running.discard(name)
        self.killed.discard(name)
        self.obey(self.supervisor.exited(name, "with exit code 1", now))

    def check(self) -> None:
        for each in self.supervisor.children.values():
            assert (each.name in self.running) == (each.state not in (WAITING, ENDED))
            assert each.due is None or each.state in (WAITING, STOPPING)
            assert (each.ready_since is not None) == (each.state is READY)
            assert each.state is not WAITING or each.due is not None, "nobody starts it"


@pytest.mark.parametrize("seed", range(300))
def test_any_order_of_events_keeps_the_rules_and_comes_to_an_end(seed: int) -> None:
    rng, now = random.Random(seed), 0.0
    world = World(Supervisor({"a": 0, "b": 0, "door": 1}, RULES, now))
    for _ in range(rng.randrange(1, 60)):
        now += rng.choice([0.0, 0.01, 0.3, 3.0, 61.0])
        world.obey(world.supervisor.advance(now))
        match rng.choice(
            ["probe"] * 6 + ["unhealthy"] * 2 + ["exit"] * 4 + ["nothing"] * 3 + ["drain", "stop"]
        ):
            case "probe" if world.running:
                world.obey(world.supervisor.probed(rng.choice(sorted(world.running)), now))
            case "unhealthy" if world.running:
                world.obey(world.supervisor.unhealthy(rng.choice(sorted(world.running)), now))
            case "exit" if world.running:
                world.exit(rng.choice(sorted(world.running)), now)
            case "drain":
                world.obey(world.supervisor.drain(now))
            case "stop":
                world.obey(world.supervisor.stop(now))
        world.check()
    # From here on nothing ends unless it is killed, and it all ends in time.
    world.obey(world.supervisor.drain(now))
    until = now + RULES.drain_s + RULES.stop_s
    while not world.supervisor.is_over:
        wake_at = world.supervisor.wake_at
        if world.killed:
            world.exit(min(world.killed), now)
        else:
            assert wake_at is not None and wake_at <= until
            now = max(now, wake_at)
            world.obey(world.supervisor.advance(now))
        world.check()
    assert not world.running and world.supervisor.advance(now + 1e6) == []
