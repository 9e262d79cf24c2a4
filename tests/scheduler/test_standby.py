"""Releasing and resuming memory, with requests, pauses, weight updates and failing ranks in any order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from segue.messages.control import Continue, Pause, PauseMode, SchedulerOutput
from segue.messages.memory import (
    MapMemory,
    MemoryAnswer,
    MemoryCommand,
    MemoryMoved,
    MemoryTag,
    ReleaseMemory,
    ResumeMemory,
    UnmapMemory,
)
from segue.messages.requests import Abort
from segue.scheduler.pause import PauseState
from segue.scheduler.scheduler import Scheduler
from segue.scheduler.standby import LOST, Standby, StandbyState
from tests.scheduler.simulation import Simulation
from tests.scheduler.test_pause_properties import find_bug, prove
from tests.scheduler.test_properties import StepMachine, prompts

RANKS = 2
ALL: tuple[MemoryTag, ...] = ("weights", "kv_cache")
some_tags = st.sampled_from([["weights"], ["kv_cache"], [*ALL]])


class FakeRank:
    """The memory of a rank. It does a command when it is told to, and may fail."""

    def __init__(self) -> None:
        self.here = set(ALL)
        self.weights = "good"  # or "lost", or "backup" while they are away
        self.commands: deque[MemoryCommand] = deque()

    def reply(self, rank: int, *, fails: bool) -> MemoryMoved:
        command = self.commands.popleft()
        if fails and (isinstance(command, MapMemory) or command.backup):
            return MemoryMoved(rank=rank, call=command.call, errors=["no memory"])
        for tag in command.tags:
            if isinstance(command, MapMemory):
                if tag == "weights" and tag not in self.here:
                    self.weights = {"backup": "good"}.get(self.weights, self.weights)
                self.here.add(tag)
            elif tag in self.here:
                self.here.remove(tag)
                if tag == "weights":
                    self.weights = "backup" if command.backup and self.weights == "good" else "lost"
        return MemoryMoved(rank=rank, call=command.call, fields={"num_bytes": 10})


class StandbySimulation(Simulation):
    """A scheduler and its ranks; the controller releases, resumes, pauses and updates."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"enable_memory_saver": True, **options})
        self.scheduler.standby = Standby(self.scheduler, RANKS)
        self.standby, self.control = self.scheduler.standby, self.scheduler.control
        self.ranks = [FakeRank() for _ in range(RANKS)]
        self.answers: dict[int, MemoryAnswer] = {}
        self.calls = 0
        self.released: list[MemoryTag] = []  # what the last output has shown
        self.has_failed_twice = False

    def release(self, *tags: MemoryTag, backup: bool = False) -> int:
        return self._ask(ReleaseMemory(self._next(), list(tags), backup))

    def resume(self, *tags: MemoryTag) -> int:
        return self._ask(ResumeMemory(self._next(), list(tags)))

    def pause(self, mode: PauseMode) -> None:
        self.control.pause(Pause(self._next(), mode), self.now)
        self.settle()

    def proceed(self) -> None:
        self.control.continue_(Continue(self._next()))
        self.settle()

    def reply(self, rank: int, *, fails: bool = False) -> None:
        """A rank does its next command."""
        command = self.ranks[rank].commands[0]
        if isinstance(command, UnmapMemory):
            assert not self.results, "memory goes while a step is in flight"
            if "kv_cache" in command.tags:
                assert not self.scheduler.running and not self.scheduler.resources.prefix.num_pages
                self.device.kv.clear()
        is_undone = self.standby._move is not None and bool(self.standby._move.failed)
        reply = self.ranks[rank].reply(rank, fails=fails)
        self.has_failed_twice |= is_undone and bool(reply.errors)
        self.standby.on_rank(reply, self.now)
        self.settle()

    def reply_all(self) -> None:
        while any(rank.commands for rank in self.ranks):
            for number, rank in enumerate(self.ranks):
                if rank.commands:
                    self.reply(number)

    def update(self, *, whole: bool = True) -> None:
        """Commit an update of the weights; the control of updates accepts one only if they are available."""
        weights = self.scheduler.weights
        assert weights.unavailable is None and not self.results
        assert all("weights" in rank.here for rank in self.ranks), "weights are written that are away"
        self.control.hold("weight_commit")
        self.settle()
        assert self.control.state is PauseState.PAUSED
        weights.commit(None, flush_cache=False)
        if whole:
            weights.missing = None
            for rank in self.ranks:
                rank.weights = "good"
        self.control.release("weight_commit")
        self.settle()

    def settle(self) -> None:
        """Take and send what there is, as the loop does."""
        for _ in range(2):
            messages = self.control.advance(self.now)
            more, commands = self.standby.advance()
            for each in commands:
                for rank, command in zip(self.ranks, each, strict=True):
                    rank.commands.append(command)
            for message in [*messages, *more]:
                if isinstance(message, MemoryAnswer):
                    assert message.call not in self.answers, "a call is answered twice"
                    self.answers[message.call] = message
                elif isinstance(message, SchedulerOutput):
                    self.released = message.counters.released
                    self.end(message.finished)

    def launch(self) -> Any:
        plan = super().launch()
        if plan is not None:
            assert self.standby.state is StandbyState.AWAKE
            for rank in self.ranks:
                assert rank.here == {*ALL}, "a step runs while memory is away"
                assert rank.weights == "good", "a step runs with weights that were lost"
        return plan

    def apply(self) -> SchedulerOutput:
        output = super().apply()
        self.settle()
        return output

    def check(self) -> None:
        super().check()
        if self.standby._move is None:
            for rank in self.ranks:
                expected = {*ALL} - self.standby.away
                assert rank.here == expected or self.has_failed_twice, "the ranks differ"
                assert rank.here >= expected
            assert self.scheduler.weights.missing is not None or (
                all(rank.weights == "good" for rank in self.ranks)
            ), "weights are lost, and nobody knows"

    def _next(self) -> int:
        self.calls += 1
        return self.calls

    def _ask(self, message: ReleaseMemory | ResumeMemory) -> int:
        self.standby.request(message)
        self.settle()
        return message.call


class StandbyMachine(StepMachine):
    """Every event in any order, with up to two steps in flight."""

    sim: StandbySimulation
    num_steps = 0

    @initialize(
        spare=st.integers(0, 8), slots=st.integers(1, 4), prefix=st.booleans(), mode=st.sampled_from([4, 16])
    )
    def start(self, spare: int, slots: int, prefix: bool, mode: int) -> None:
        self.sim = StandbySimulation(
            num_pages=-(-64 // mode) + spare,
            page_size=mode,
            max_seq_len=64,
            max_running_requests=slots,
            max_queued_requests=1000,
            disable_prefix_cache=not prefix,
        )
        self.memory_calls: list[int] = []

    @rule(added=st.lists(prompts, min_size=1, max_size=3), tokens=st.integers(1, 30))
    def add(self, added: list[list[int]], tokens: int) -> None:
        for prompt in added:
            self.sim.add(f"r{len(self.sim.prompts)}", list(prompt), max_new_tokens=tokens)

    @rule(tags=some_tags, backup=st.booleans())
    def release(self, tags: list[MemoryTag], backup: bool) -> None:
        self.memory_calls.append(self.sim.release(*tags, backup=backup))

    @rule(tags=some_tags, turns=st.integers(1, 9))
    def release_running(self, tags: list[MemoryTag], turns: int) -> None:
        self.run_some(turns, True)
        self.memory_calls.append(self.sim.release(*tags))

    @rule(tags=some_tags)
    def resume(self, tags: list[MemoryTag]) -> None:
        self.memory_calls.append(self.sim.resume(*tags))

    @precondition(lambda self: not self.sim.results and self.sim.standby._move is None)
    @rule(tags=some_tags, failing=st.integers(0, RANKS - 1))
    def one_rank_cannot_resume(self, tags: list[MemoryTag], failing: int) -> None:
        self.memory_calls.append(self.sim.release(*tags))
        self.sim.reply_all()
        self.memory_calls.append(self.sim.resume(*tags))
        for rank in range(RANKS):
            if self.sim.ranks[rank].commands:
                self.sim.reply(rank, fails=rank == failing)

    @precondition(lambda self: any(rank.commands for rank in self.sim.ranks))
    @rule(data=st.data(), fails=st.sampled_from([False, False, False, True]))
    def reply(self, data: st.DataObject, fails: bool) -> None:
        waiting = [number for number, rank in enumerate(self.sim.ranks) if rank.commands]
        self.sim.reply(data.draw(st.sampled_from(waiting)), fails=fails)

    @rule()
    def reply_all(self) -> None:
        self.sim.reply_all()

    @precondition(lambda self: self.sim.scheduler.weights.unavailable is None and not self.sim.results)
    @rule(whole=st.booleans())
    def update(self, whole: bool) -> None:
        self.sim.update(whole=whole)

    @rule(is_open=st.booleans())
    def open_update(self, is_open: bool) -> None:
        self.sim.scheduler.weights.is_updating = is_open and self.sim.scheduler.weights.unavailable is None

    @rule(mode=st.sampled_from(["wait", "in_place", "retract"]))
    def pause(self, mode: PauseMode) -> None:
        self.sim.pause(mode)

    @rule()
    def proceed(self) -> None:
        self.sim.proceed()

    @precondition(lambda self: len(self.sim.finished) < len(self.sim.prompts))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = [rid for rid in self.sim.prompts if rid not in self.sim.finished]
        rid = data.draw(st.sampled_from(live))
        self.sim.end(self.sim.scheduler.abort(Abort(rid)))
        assert rid in self.sim.finished, "an abort acts at once"
        self.sim.settle()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "sim"):
            type(self).num_steps += 1
            self.sim.check()

    def teardown(self) -> None:
        if not hasattr(self, "sim"):
            return
        sim = self.sim
        sim.scheduler.weights.is_updating = False
        while sim.results:
            sim.apply()
        sim.reply_all()
        call = sim.resume(*ALL)
        sim.reply_all()
        assert not sim.answers[call].error
        assert sim.answers.keys() >= {*self.memory_calls}, "a call was never answered"
        if sim.scheduler.weights.missing is not None:
            sim.update()
        sim.proceed()
        sim.run(overlap=True)
        assert sim.finished.keys() == sim.prompts.keys(), "a request never ended"
        assert sim.released == [] and not sim.control.holders


def test_memory_is_released_and_resumed_in_any_order() -> None:
    print(f"{prove(StandbyMachine, examples=60)} events without a violation")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_memory_is_released_and_resumed_in_any_order_for_long() -> None:
    assert prove(StandbyMachine, examples=1500) >= 30_000


# Bugs that the machine must catch.

_unmap, _on_mapped, _let_go = Standby._unmap, Standby._on_mapped, Standby._let_go


def unmaps_while_a_step_is_in_flight(self: Standby) -> bool:
    return True


def lets_go_without_weights(self: Standby) -> None:
    missing, self._scheduler.weights.missing = self._scheduler.weights.missing, None
    _let_go(self)
    self._scheduler.weights.missing = missing


def keeps_the_cache_of_released_kv(self: Scheduler) -> int:
    return 0


def leaves_what_other_ranks_have_mapped(self: Standby, replies: Any, wrong: str, now: float) -> None:
    if wrong and self._move is not None and not self._move.failed:
        self._move.failed = wrong
        self._enter(StandbyState.HELD)
        self._end(replies)
    else:
        _on_mapped(self, replies, wrong, now)


def forgets_who_asked_meanwhile(self: Standby, message: Any) -> None:
    if self._move is None:
        self._calls.append(message)


SEEDED: list[tuple[type, str, Any]] = [
    (Standby, "_stands_still", property(unmaps_while_a_step_is_in_flight)),
    (Standby, "_let_go", lets_go_without_weights),
    (Scheduler, "forget_cache", keeps_the_cache_of_released_kv),
    (Standby, "_on_mapped", leaves_what_other_ranks_have_mapped),
    (Standby, "request", forgets_who_asked_meanwhile),
]


@pytest.mark.parametrize(
    ("cls", "name", "bug"),
    [  # three of them take up to 10 s each to be found
        pytest.param(*each, marks=[] if each[1] in ("_stands_still", "request") else [pytest.mark.slow])
        for each in SEEDED
    ],
)
def test_a_seeded_bug_is_caught(
    cls: type, name: str, bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cls, name, bug)
    with pytest.raises(AssertionError):
        find_bug(StandbyMachine, examples=1000)


# The course of single calls.


@pytest.fixture
def sim() -> StandbySimulation:
    sim = StandbySimulation()
    for number in range(3):
        sim.add(f"r{number}", [1, 2, 3, number])
    for _ in range(4):
        sim.overlapped_step()
    return sim


def test_a_release_waits_for_the_step_in_flight_and_retracts_all(sim: StandbySimulation) -> None:
    sim.launch()
    call = sim.release(*ALL)
    assert sim.standby.state is StandbyState.STOPPING and not sim.ranks[0].commands
    while sim.results:
        sim.apply()
    assert sim.standby.state is StandbyState.UNMAPPING and not sim.scheduler.running
    sim.reply_all()
    assert sim.standby.state is StandbyState.HELD
    answer = sim.answers[call]
    assert (answer.tags, answer.num_bytes, answer.error) == (["kv_cache", "weights"], 20, "")
    assert LOST in answer.message and sim.released == ["kv_cache", "weights"]
    assert not sim.step(), "nothing runs"


def test_requests_go_on_after_a_resume_of_kv_at_once(sim: StandbySimulation) -> None:
    sim.release("kv_cache")
    while sim.results:
        sim.apply()
    sim.reply_all()
    sim.resume("kv_cache")
    sim.reply_all()
    assert sim.standby.state is StandbyState.AWAKE and not sim.control.holders
    sim.run()
    assert len(sim.finished) == 3


def test_requests_wait_until_all_weights_were_sent(sim: StandbySimulation) -> None:
    sim.release(*ALL)
    while sim.results:
        sim.apply()
    sim.reply_all()
    sim.resume(*ALL)
    sim.reply_all()
    assert not sim.step()
    sim.update(whole=False)
    assert not sim.step()
    sim.update()
    sim.run()
    assert len(sim.finished) == 3


def test_weights_with_a_backup_are_back_with_their_memory(sim: StandbySimulation) -> None:
    sim.release(*ALL, backup=True)
    while sim.results:
        sim.apply()
    sim.reply_all()
    sim.resume(*ALL)
    sim.reply_all()
    sim.run()
    assert len(sim.finished) == 3


def test_what_is_done_already_is_answered_at_once(sim: StandbySimulation) -> None:
    assert sim.answers[sim.resume(*ALL)].tags == []
    sim.release("weights")
    while sim.results:
        sim.apply()
    sim.reply_all()
    assert sim.answers[sim.release("weights")].tags == []


def test_a_rank_without_memory_leaves_all_of_it_released(sim: StandbySimulation) -> None:
    sim.release(*ALL)
    while sim.results:
        sim.apply()
    sim.reply_all()
    call = sim.resume(*ALL)
    sim.reply(1)
    sim.reply(0, fails=True)
    sim.reply_all()
    answer = sim.answers[call]
    assert (answer.error, answer.tags) == ("MemoryResumeError", []) and "rank 0: no memory" in answer.message
    assert [rank.here for rank in sim.ranks] == [set(), set()]
    assert sim.standby.state is StandbyState.HELD


def test_without_the_option_nothing_is_released() -> None:
    sim = StandbySimulation(enable_memory_saver=False)
    for call in (sim.release(*ALL), sim.resume(*ALL)):
        answer = sim.answers[call]
        assert answer.error == "MemorySaverError" and "--enable-memory-saver" in answer.message
    assert sim.standby.state is StandbyState.AWAKE


def test_weights_are_not_released_while_they_are_updated(sim: StandbySimulation) -> None:
    sim.scheduler.weights.is_updating = True
    answer = sim.answers[sim.release(*ALL)]
    assert answer.error == "MemorySaverError" and "complete or abort it" in answer.message
    sim.release("kv_cache")
    assert sim.standby.state is StandbyState.STOPPING
