"""Stateful property test: with events in any order, the ranks never serve a mixture of weights.

The ranks are modelled from the commands alone. Each takes its commands in order; a command may fail, and a
commit may fail after it has written a part. Calls, requests, pauses and time come in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)
from msgspec import structs

from segue.messages.control import Continue, Pause, SchedulerOutput
from segue.messages.weight_operations import (
    AbortSession,
    BeginUpdate,
    Bucket,
    CommitSession,
    Complete,
    EndUpdate,
    Group,
    LeaveGroup,
    Manifest,
    UpdateFromDisk,
    UpdateFromTensor,
    WeightOperation,
)
from segue.messages.weight_update import (
    Commit,
    Discard,
    Join,
    Leave,
    Load,
    RankReply,
    Receive,
    Received,
    Stage,
    Take,
    WeightAnswer,
    WeightCall,
    WeightCommand,
)
from segue.scheduler.invariants import find_problems
from segue.weight_update.control.calls import WeightControl
from segue.weight_update.control.outbox import Outbox
from segue.weight_update.control.session import UpdatePhase
from segue.weight_update.control.state_machine import WeightMachine
from tests.scheduler.simulation import Simulation
from tests.scheduler.test_pause_properties import find_bug, prove
from tests.weight_update.control.operations import join, prepared, single

RANKS = 2
GROUP = Group(name="g", master_address="a", master_port=1, rank_offset=1, world_size=3, backend="gloo")
BUCKETS = [Bucket(names=[name], dtypes=["float32"], shapes=[[2]]) for name in "ab"]
WHOLE = Manifest(group_name="g", buckets=BUCKETS)


class Rank:
    """A model of one rank: its served weights, and its state for the sessions, which are given by number."""

    def __init__(self) -> None:
        self.commands: deque[WeightCommand] = deque()
        self.weights = 0  # the session that brought the served weights
        self.torn = False  # whether a commit has failed after it wrote a part
        self.staged: set[int] = set()
        self.complete: set[int] = set()  # sessions all of whose tensors have arrived
        self.receiving: int | None = None
        self.buckets = 0


class Updates(RuleBasedStateMachine):
    """Rank 0's state machine, the scheduler, and ranks that may fail."""

    num_steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.sim = Simulation()
        self.control = WeightControl(self.sim.scheduler.weights, RANKS)
        self.ranks = [Rank() for _ in range(RANKS)]
        self.now = 0.0
        self.calls = 0
        self.owed: set[int] = set()
        self.names = 0

    # --- plumbing ---

    def ask(self, request: WeightOperation) -> None:
        self.calls += 1
        self.owed.add(self.calls)
        self.control.request(WeightCall(self.calls, request), self.now)
        self.go()

    def go(self) -> None:
        type(self).num_steps += 1
        for _ in range(10):
            messages = self.sim.scheduler.control.advance(self.now)
            more, commands = self.control.advance(self.now)
            for message in [*messages, *more]:
                if isinstance(message, WeightAnswer):
                    assert message.call in self.owed, "a call was answered twice"
                    self.owed.remove(message.call)
                elif isinstance(message, SchedulerOutput):
                    self.sim.end(message.finished)
            for pair in commands:
                for rank, command in zip(self.ranks, pair, strict=True):
                    rank.commands.append(command)
            if not messages and not more and not commands:
                return
        raise AssertionError("the state machine sends messages without end")

    # --- clients ---

    @rule(offset=st.sampled_from([1, 1, 1, 0]))
    def join(self, offset: int) -> None:
        self.ask(join(structs.replace(GROUP, rank_offset=offset)))

    @rule()
    def leave(self) -> None:
        self.ask(LeaveGroup(group_name="g"))

    @rule(partial=st.booleans(), name=st.sampled_from([None, "one", "two"]), empty=st.booleans())
    def prepare(self, partial: bool, name: str | None, empty: bool) -> None:
        manifest = structs.replace(WHOLE, partial=partial, buckets=[] if empty else BUCKETS)
        self.ask(prepared(manifest, session_id=name, timeout_s=10.0, arm_timeout_s=100.0))

    @rule(flush=st.booleans(), commit=st.booleans(), name=st.sampled_from([None, None, "one"]))
    def complete(self, flush: bool, commit: bool, name: str | None) -> None:
        self.ask(Complete(session_id=name, flush_cache=flush, commit=commit))

    @rule()
    def commit(self) -> None:
        self.ask(CommitSession())

    @rule()
    def abort(self) -> None:
        self.ask(AbortSession())

    @rule(kind=st.integers(0, 2), flush=st.booleans(), abort=st.booleans())
    def single(self, kind: int, flush: bool, abort: bool) -> None:
        options: Any = {"flush_cache": flush, "abort_all_requests": abort}
        if kind == 0:
            self.ask(single(structs.replace(WHOLE, buckets=WHOLE.buckets[:1], partial=True), **options))
        elif kind == 1:
            self.ask(UpdateFromDisk(model_path="p", **options))
        else:
            self.ask(UpdateFromTensor(serialized_named_tensors=["x"], **options))

    @rule()
    def begin(self) -> None:
        self.ask(BeginUpdate())

    @rule()
    def end(self) -> None:
        self.ask(EndUpdate())

    @rule(mode=st.sampled_from(["wait", "in_place", "retract", "abort"]))
    def pause(self, mode: Any) -> None:
        self.sim.scheduler.control.pause(Pause(0, mode), self.now)
        self.go()

    @rule()
    def proceed(self) -> None:
        self.sim.scheduler.control.continue_(Continue(0))
        self.go()

    @rule(length=st.integers(1, 12), count=st.integers(1, 20))
    def request(self, length: int, count: int) -> None:
        self.names += 1
        if len(self.sim.scheduler.requests) >= 6:
            return
        if self.sim.scheduler.weights.poisoned is None:
            self.sim.add(f"r{self.names}", list(range(length)), max_new_tokens=count)
        else:
            with pytest.raises(AssertionError):  # it is rejected
                self.sim.add(f"r{self.names}", [1], max_new_tokens=1)
            for table in (self.sim.prompts, self.sim.params, self.sim.outputs, self.sim.prompt_logprobs):
                del table[f"r{self.names}"]
        self.go()

    @rule(seconds=st.sampled_from([1.0, 9.0, 30.0, 101.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.go()

    # --- the loop ---

    @rule()
    def launch(self) -> None:
        if len(self.sim.results) < 2 and self.sim.launch() is not None:
            assert all(not rank.torn for rank in self.ranks), "a step runs on torn weights"
            assert len({rank.weights for rank in self.ranks}) == 1, "a step runs on a mixture of weights"
            assert not any(isinstance(command, Commit) for rank in self.ranks for command in rank.commands)
        self.go()

    @precondition(lambda self: self.sim.results)
    @rule()
    def apply(self) -> None:
        self.sim.apply()
        self.go()

    # --- the ranks ---

    @rule(index=st.integers(0, RANKS - 1), fate=st.sampled_from(["good"] * 6 + ["bad", "torn"]))
    def work(self, index: int, fate: str) -> None:
        """A rank carries out its next command."""
        rank = self.ranks[index]
        if not rank.commands:
            return
        command = rank.commands.popleft()
        errors: list[str] = [] if fate == "good" else ["no"]
        fields: dict[str, Any] = {}
        match command:
            case Join():
                fields = {"is_new": not errors, "kept": False}
            case Stage():
                rank.staged.add(command.session)
                rank.complete.discard(command.session)
                if command.manifest.discard and fate != "torn":
                    errors = []
            case Receive():
                if not errors:
                    rank.receiving, rank.buckets = command.session, 0
            case Load() | Take():
                rank.staged.add(command.session)
                rank.complete.add(command.session)
            case Commit():
                assert not self.sim.results, "weights change under a step in flight"
                assert command.session in rank.staged & rank.complete, "not everything has arrived"
                if not errors:
                    rank.weights, rank.torn = command.session, False
                    rank.staged.discard(command.session)
                else:
                    rank.torn = rank.torn or fate == "torn"
                fields = {"touched": not errors or fate == "torn"}
            case Discard():
                errors = []
                rank.staged.discard(command.session)
                if rank.receiving == command.session:
                    rank.receiving = None
            case Leave():
                errors = []
        self.control.on_rank(RankReply(rank=index, call=command.call, errors=errors, fields=fields), self.now)
        self.go()

    @rule(receiving=st.sampled_from([(), (0,), (1,), (0, 1)]), commits=st.booleans())
    def hurry(self, receiving: tuple[int, ...], commits: bool) -> None:
        """The ranks carry out their commands, and some receive everything."""
        for _ in range(5):  # one reply leads to the next command
            for index, rank in enumerate(self.ranks):
                while rank.commands and (commits or not isinstance(rank.commands[0], Commit)):
                    self.work(index, "good")
        for index in receiving:
            while self.ranks[index].receiving is not None:
                self.receive(index, None)

    @rule(index=st.integers(0, RANKS - 1), error=st.sampled_from([None] * 9 + ["gone"]))
    def receive(self, index: int, error: str | None) -> None:
        """A rank gets one more bucket, or learns that the trainer has gone."""
        rank = self.ranks[index]
        if rank.receiving is None:
            return
        session, done = rank.receiving, rank.buckets >= 2
        rank.buckets = min(rank.buckets + 1, 2)
        if error or done:
            rank.receiving = None
        if done and error is None:
            rank.complete.add(session)
        event = Received(
            rank=index,
            session=session,
            num_buckets=rank.buckets,
            num_bytes=8 * rank.buckets,
            done=done and error is None,
            error=error,
        )
        self.control.on_rank(event, self.now)
        self.go()

    # --- invariants ---

    @invariant()
    def nothing_is_held_without_a_commit(self) -> None:
        session = self.control.machine.session
        held = "weight_commit" in self.sim.scheduler.control.holders
        assert held == (session is not None and session.phase is UpdatePhase.COMMITTING)

    @invariant()
    def the_ranks_agree(self) -> None:
        session = self.control.machine.session
        if session is not None and session.phase is UpdatePhase.COMMITTING:
            return
        if self.sim.scheduler.weights.poisoned is None:
            assert len({rank.weights for rank in self.ranks}) == 1 and not any(r.torn for r in self.ranks)
        assert (self.control.machine.state == "poisoned") == (
            session is None and self.sim.scheduler.weights.poisoned is not None
        )

    @invariant()
    def nothing_is_left_staged(self) -> None:
        session = self.control.machine.session
        for rank in self.ranks:
            open_ = {session.number} if session is not None else set()
            leaving = {command.session for command in rank.commands if isinstance(command, Discard)}
            assert rank.staged <= open_ | leaving, "a session that has ended keeps its memory"

    @invariant()
    def the_scheduler_is_sound(self) -> None:
        assert find_problems(self.sim.scheduler) == []

    def teardown(self) -> None:
        """Run everything to its end; every call must get an answer."""
        self.sim.scheduler.control.continue_(Continue(0))
        self.go()
        for _ in range(2000):
            if not self.owed and not self.sim.scheduler.has_work and self.control.machine.session is None:
                break
            while self.sim.results:
                self.apply()
            self.launch()
            for index in range(RANKS):
                self.work(index, "good")
            self.wait(101.0)
        assert not self.owed, f"calls {self.owed} were never answered ({self.control.machine.state})"
        self.nothing_is_left_staged()


def test_updates_with_events_in_any_order() -> None:
    print(f"{prove(Updates, examples=60)} events without a violation")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_updates_with_events_in_any_order_for_long() -> None:
    count = prove(Updates, examples=1500)
    print(f"{count} events without a violation")
    assert count >= 50_000


# Bugs that the machine must catch: each test puts one of them into the state machine.

_on_reply, _on_received, _abort = Outbox.on_reply, WeightMachine.on_received, WeightMachine.abort


def waits_for_one_reply_only(self: Outbox, reply: RankReply, now: float) -> None:
    if reply.call in self._pending:
        self._pending[reply.call][1].update(dict.fromkeys(range(RANKS), reply))
    _on_reply(self, reply, now)


def takes_one_done_rank_for_all(self: WeightMachine, event: Received, now: float) -> None:
    if event.done and self.session is not None:
        self.session.done.update(range(RANKS))
    _on_received(self, event, now)


def never_poisons(self: WeightMachine, why: str) -> None:
    pass


def forgets_to_discard(self: WeightMachine, session: Any, why: str, now: float) -> None:
    command, self._outbox.command = self._outbox.command, lambda *commands, **options: None  # type: ignore[method-assign]
    try:
        _abort(self, session, why, now)
    finally:
        self._outbox.command = command  # type: ignore[method-assign]


def commits_before_the_hold_takes_effect(self: WeightMachine, session: Any, now: float) -> None:
    if "WRITING" not in session.times:
        session.times["WRITING"] = now
        self._outbox.command(Commit(session=session.number), then=self._on_committed)


def releases_before_the_ranks_have_written(self: WeightMachine, session: Any, now: float) -> None:
    commits_before_the_hold_takes_effect(self, session, now)
    self._port.release()


SEEDED: list[tuple[type, str, Callable[..., Any]]] = [
    (Outbox, "on_reply", waits_for_one_reply_only),
    (WeightMachine, "on_received", takes_one_done_rank_for_all),
    (WeightMachine, "_poison", never_poisons),
    (WeightMachine, "abort", forgets_to_discard),
    (WeightMachine, "_write", commits_before_the_hold_takes_effect),
    (WeightMachine, "_write", releases_before_the_ranks_have_written),
]


QUICK = {waits_for_one_reply_only, forgets_to_discard, releases_before_the_ranks_have_written}


@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [
        pytest.param(*each, id=each[2].__name__, marks=[] if each[2] in QUICK else [pytest.mark.slow])
        for each in SEEDED
    ],
)
def test_a_seeded_bug_is_caught(
    owner: type, name: str, bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises((AssertionError, KeyError)):
        find_bug(Updates, examples=2000)
