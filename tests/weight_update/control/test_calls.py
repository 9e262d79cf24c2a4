"""Weight updates on the pure scheduler; the ranks are lists of commands that the tests reply to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import structs

from segue.messages.control import Continue, Flush, Flushed, Pause, Paused, SchedulerOutput
from segue.messages.requests import AddRequest, Rejected, SamplingParams, pack_ids
from segue.messages.weight_operations import (
    OPERATIONS,
    AbortSession,
    BeginUpdate,
    Bucket,
    CheckWeights,
    CommitSession,
    Complete,
    EndUpdate,
    GetUpdateStatus,
    Group,
    JoinGroup,
    LeaveGroup,
    Manifest,
    Prepare,
    SetVersion,
    UpdateFromDisk,
    UpdateFromTensor,
    WeightOperation,
)
from segue.messages.weight_update import (
    Commit,
    Discard,
    Inspect,
    Join,
    Load,
    RankReply,
    Receive,
    Received,
    Stage,
    Take,
    WeightAnswer,
    WeightCall,
    WeightCommand,
    WeightNotice,
)
from segue.scheduler.invariants import find_problems
from segue.weight_update.control.calls import WeightControl
from tests.scheduler.simulation import Simulation
from tests.weight_update.control.operations import join, prepared, single

GROUP = Group(
    name="g", master_address="localhost", master_port=1, rank_offset=1, world_size=3, backend="gloo"
)
TWO = Manifest(
    group_name="g",
    buckets=[Bucket(names=["a"], dtypes=["float32"], shapes=[[2]]), Bucket(names=[], dtypes=[], shapes=[])],
)
PART = structs.replace(TWO, buckets=TWO.buckets[:1], partial=True)


class Engine:
    """A simulation with two ranks. By default they carry out each command at once."""

    def __init__(self, **options: int | str) -> None:
        self.sim = Simulation(**options)
        self.scheduler = self.sim.scheduler
        self.weights = WeightControl(self.scheduler.weights, 2)
        self.now = 0.0
        self.calls = 0
        self.answers: dict[int, list[WeightAnswer]] = {}
        self.others: list[Any] = []
        self.pending: list[tuple[int, WeightCommand]] = []  # commands without a reply, in order
        self.done: list[WeightCommand] = []  # rank 0's commands
        self.silent: set[type] = set()  # kinds of commands that get no reply
        self.broken: dict[tuple[int, type], list[str]] = {}  # (rank, kind of command) -> errors of the reply
        self.touched: set[int] = {0, 1}  # ranks whose commit writes served weights
        self.dropped: list[str] = []  # groups that the ranks found dead
        self.arrives = True  # whether a receive has all tensors at once
        self.fields: dict[type, dict[str, Any]] = {}  # more fields of the replies, by kind of command

    def ask(self, request: WeightOperation) -> int:
        self.calls += 1
        self.weights.request(WeightCall(self.calls, request), self.now)
        self.go()
        return self.calls

    def answer(self, call: int) -> WeightAnswer:
        assert call in self.answers, "no answer yet"
        (answer,) = self.answers[call]
        return answer

    def reply(self, request: WeightOperation) -> WeightAnswer:
        return self.answer(self.ask(request))

    def go(self) -> None:
        """Deliver messages, commands and replies until there are none."""
        while True:
            pauses = self.scheduler.control.advance(self.now)
            messages, commands = self.weights.advance(self.now)
            for message in [*pauses, *messages]:
                if isinstance(message, WeightAnswer):
                    self.answers.setdefault(message.call, []).append(message)
                else:
                    self.others.append(message)
                    if isinstance(message, SchedulerOutput):
                        self.sim.end(message.finished)
            for pair in commands:
                self.pending += enumerate(pair)
                if type(pair[0]) not in (Discard,):
                    self.done.append(pair[0])
            ready = [each for each in self.pending if type(each[1]) not in self.silent]
            self.pending = [each for each in self.pending if type(each[1]) in self.silent]
            for rank, command in ready:
                self.carry_out(rank, command)
            if not messages and not commands and not ready:
                return

    def carry_out(self, rank: int, command: WeightCommand) -> None:
        errors = self.broken.get((rank, type(command)), [])
        fields: dict[str, Any] = {}
        if isinstance(command, Commit):
            fields = {"touched": rank in self.touched}
        if isinstance(command, Take):
            fields = {"num_bytes": 5}
        if isinstance(command, Join):
            fields = {"is_new": True, "dropped": self.dropped}
        if isinstance(command, Inspect):
            fields = {"checksums": {"a": 1 + rank}}
        fields |= self.fields.get(type(command), {})
        self.weights.on_rank(RankReply(rank=rank, call=command.call, errors=errors, fields=fields), self.now)
        if isinstance(command, Receive) and self.arrives:
            self.receive(rank, 2, done=True)

    def receive(self, rank: int, count: int, *, done: bool = False, error: str | None = None) -> None:
        session = self.weights.machine.num_sessions
        event = Received(
            rank=rank, session=session, num_buckets=count, num_bytes=8 * count, done=done, error=error
        )
        self.weights.on_rank(event, self.now)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.go()

    def pause(self, mode: Any) -> None:
        self.scheduler.control.pause(Pause(1000 + self.calls, mode), self.now)
        self.go()

    @property
    def state(self) -> str:
        return self.weights.machine.state

    def kinds(self) -> list[str]:
        """Returns the kinds of rank 0's commands since the last call, and forgets them."""
        names = [type(command).__name__ for command in self.done]
        self.done.clear()
        return names


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    assert engine.reply(join(GROUP)).success
    engine.kinds()
    yield engine
    assert not find_problems(engine.scheduler)
    assert all(len(answers) == 1 for answers in engine.answers.values()), "a call has one answer"
    assert "weight_commit" not in engine.scheduler.control.holders or engine.state == "committing"


def prepare(manifest: Manifest = TWO, **fields: Any) -> Prepare:
    return prepared(manifest, **fields)


def test_prepare_and_status_report_whether_steps_are_run(engine: Engine) -> None:
    assert engine.reply(prepare()).fields["generating"] is False
    engine.reply(AbortSession())
    engine.sim.add("a", [1, 2, 3], max_new_tokens=5)
    assert engine.reply(prepare()).fields["generating"] is True
    assert engine.reply(GetUpdateStatus()).fields["generating"] is True
    engine.pause("in_place")
    assert engine.reply(GetUpdateStatus()).fields["generating"] is False


def test_prepare_receive_complete(engine: Engine) -> None:
    engine.arrives = False
    ready = engine.reply(prepare())
    assert ready.success and ready.fields["session_id"] == "session-1"
    assert engine.kinds() == ["Stage", "Receive"]
    assert engine.state == "prepared"
    engine.receive(0, 1)
    assert engine.state == "receiving"
    waiting = engine.ask(Complete(group_name="g"))
    engine.receive(0, 2, done=True)
    engine.go()
    assert waiting not in engine.answers, "rank 1 has not received everything"
    assert engine.reply(GetUpdateStatus()).fields["num_buckets_received"] == 0, "the slowest rank counts"
    engine.receive(1, 2, done=True)
    engine.go()
    done = engine.answer(waiting)
    assert done.success and done.fields["num_buckets_received"] == 2
    assert done.fields["weight_version"] == "1" == engine.scheduler.weight_version
    assert engine.kinds() == ["Commit"]
    assert engine.state == "idle"
    assert engine.others[-1].version == "1"


def test_no_rank_receives_before_every_rank_has_checked(engine: Engine) -> None:
    engine.broken[1, Stage] = ["tensor 'a' is unknown"]
    answer = engine.reply(prepare())
    assert not answer.success and "rank 1: tensor 'a' is unknown" in answer.message
    assert engine.kinds() == ["Stage"]
    assert engine.state == "idle"
    engine.broken = {}
    assert engine.reply(prepare()).success


def test_prepare_is_answered_when_every_rank_has_posted_its_receive(engine: Engine) -> None:
    engine.silent.add(Receive)
    call = engine.ask(prepare())
    rank, command = engine.pending[0]
    engine.carry_out(rank, command)
    engine.go()
    assert call not in engine.answers
    engine.carry_out(*engine.pending[1])
    engine.go()
    assert engine.answer(call).success


def test_a_rank_may_receive_before_another_has_posted(engine: Engine) -> None:
    engine.silent.add(Receive)
    call = engine.ask(prepare())
    engine.carry_out(*engine.pending[0])
    engine.carry_out(*engine.pending[1])
    engine.go()
    assert engine.answer(call).success
    assert engine.state == "received"


def test_every_operation_has_a_handler(engine: Engine) -> None:
    assert engine.weights._handlers.keys() == set(OPERATIONS.values())


def test_the_group_and_the_count_are_checked_first(engine: Engine) -> None:
    other = structs.replace(TWO, group_name="h")
    assert "unknown group 'h' (known: 'g')" in engine.reply(prepare(other)).message
    assert "num_buckets=3, but buckets has 2" in engine.reply(prepare(num_buckets=3)).message
    assert engine.kinds() == []


@pytest.mark.parametrize(("offset", "size"), [(0, 3), (2, 3), (1, 2), (-1, 9)])
def test_a_rank_offset_that_does_not_fit_the_group_is_refused(engine: Engine, offset: int, size: int) -> None:
    group = structs.replace(GROUP, name="h", rank_offset=offset, world_size=size)
    answer = engine.reply(join(group))
    assert not answer.success and f"rank_offset={offset}" in answer.message
    assert engine.kinds() == []


def test_a_group_that_only_some_ranks_could_join_is_left(engine: Engine) -> None:
    engine.broken[1, Join] = ["no trainer"]
    answer = engine.reply(join(structs.replace(GROUP, name="h")))
    assert not answer.success
    assert engine.kinds() == ["Join", "Leave"]
    assert "h" not in engine.weights.groups.joined
    engine.broken = {}
    assert engine.reply(join(structs.replace(GROUP, name="h"))).success


def test_a_group_joined_anew_ends_its_session(engine: Engine) -> None:
    engine.arrives = False
    engine.reply(prepare())
    assert engine.reply(join(GROUP)).success
    assert engine.state == "idle"
    answer = engine.reply(Complete(group_name="g"))
    assert not answer.success and "joined anew" in answer.message


def test_groups_that_the_ranks_found_dead_are_forgotten(engine: Engine) -> None:
    engine.arrives = False
    engine.reply(prepare())
    engine.dropped = ["g"]
    assert engine.reply(join(structs.replace(GROUP, name="h"))).success
    assert list(engine.weights.groups.joined) == ["h"]
    assert "lost its trainer" in engine.reply(Complete()).message


def test_a_group_joined_anew_does_not_disturb_a_commit(engine: Engine) -> None:
    engine.silent.add(Commit)
    engine.reply(prepare())
    waiting = engine.ask(Complete())
    assert engine.state == "committing"
    assert engine.reply(join(GROUP)).success
    engine.reply(LeaveGroup(group_name="g"))
    assert engine.state == "committing"
    for rank, command in engine.pending:
        engine.carry_out(rank, command)
    engine.go()
    assert engine.answer(waiting).success and engine.scheduler.weight_version == "1"


def test_one_session_at_a_time(engine: Engine) -> None:
    engine.reply(prepare(session_id="one"))
    answer = engine.reply(prepare(session_id="two"))
    assert not answer.success and "session 'one' is open (received); complete or abort it" in answer.message
    assert not engine.reply(BeginUpdate()).success
    assert not engine.reply(UpdateFromDisk(model_path="p")).success
    assert engine.reply(Complete(session_id="one")).success


def test_a_repeated_prepare_gets_the_same_answer(engine: Engine) -> None:
    first = engine.reply(prepare(session_id="one"))
    again = engine.reply(prepare(session_id="one"))
    assert again.fields == first.fields and again.success
    assert engine.kinds() == ["Stage", "Receive"], "nothing is done twice"
    other = structs.replace(TWO, flattened=True)
    assert not engine.reply(prepare(other, session_id="one")).success


def test_a_prepare_without_an_id_counts_as_repeated_until_a_bucket_arrives(engine: Engine) -> None:
    engine.arrives = False
    first = engine.reply(prepare())
    assert engine.reply(prepare()).fields == first.fields
    engine.receive(0, 1)
    assert not engine.reply(prepare()).success


def test_a_prepare_that_is_repeated_before_its_answer_gets_the_same_answer(engine: Engine) -> None:
    engine.silent.add(Receive)
    calls = [engine.ask(prepare()), engine.ask(prepare())]
    for rank, command in engine.pending:
        engine.carry_out(rank, command)
    engine.go()
    assert all(engine.answer(call).success for call in calls)


def test_a_complete_that_is_repeated_gets_the_same_answer(engine: Engine) -> None:
    engine.reply(prepare())
    first = engine.reply(Complete(group_name="g"))
    assert engine.reply(Complete(group_name="g")).fields == first.fields
    assert engine.reply(Complete(session_id="session-1")).fields == first.fields
    assert not engine.reply(Complete(session_id="another")).success
    assert engine.kinds() == ["Stage", "Receive", "Commit"]
    assert not engine.reply(prepare(num_buckets=9)).success, "even a refused prepare forgets the answer"
    assert "no session is open" in engine.reply(Complete(group_name="g")).message


def test_leaving_the_group_forgets_the_answer(engine: Engine) -> None:
    engine.reply(prepare())
    engine.reply(Complete())
    assert engine.reply(LeaveGroup(group_name="g")).success
    assert not engine.reply(Complete()).success
    assert "unknown group 'g'" in engine.reply(LeaveGroup(group_name="g")).message


def test_leaving_the_group_ends_its_session(engine: Engine) -> None:
    engine.arrives = False
    engine.reply(prepare())
    waiting = engine.ask(Complete())
    engine.reply(LeaveGroup(group_name="g"))
    assert "group 'g' was destroyed" in engine.answer(waiting).message
    assert engine.state == "idle"


def test_complete_is_refused_without_a_session_and_for_another_session(engine: Engine) -> None:
    assert "no session is open" in engine.reply(Complete()).message
    engine.reply(prepare(session_id="one"))
    assert "session 'two' is not open; 'one' is" in engine.reply(Complete(session_id="two")).message
    assert "of group 'g', not 'h'" in engine.reply(Complete(group_name="h")).message
    assert engine.reply(Complete(session_id="one")).success


def test_complete_without_commit_leaves_the_commit_to_another_call(engine: Engine) -> None:
    engine.reply(prepare())
    assert not engine.reply(CommitSession(session_id="no")).success
    received = engine.reply(Complete(commit=False))
    assert received.success and received.fields["weight_version"] == "0"
    assert engine.state == "received"
    done = engine.reply(CommitSession())
    assert done.success and done.fields["weight_version"] == "1"


def test_received_weights_that_are_never_committed_are_given_up(engine: Engine) -> None:
    engine.reply(prepare(arm_timeout_s=100.0))
    engine.tick(99)
    assert engine.state == "received"
    engine.tick(1)
    assert engine.state == "idle" and engine.scheduler.weight_version == "0"
    assert "no commit came" in engine.reply(Complete()).message


def test_a_commit_before_everything_was_received_is_refused(engine: Engine) -> None:
    engine.arrives = False
    engine.reply(prepare())
    answer = engine.reply(CommitSession())
    assert not answer.success and "is prepared; complete it first" in answer.message


def test_an_abort_leaves_the_served_weights(engine: Engine) -> None:
    engine.reply(prepare())
    assert engine.reply(AbortSession()).success
    assert engine.state == "idle" and engine.scheduler.weight_version == "0"
    assert "aborted by a client" in engine.reply(Complete()).message
    assert not engine.reply(AbortSession()).success


def test_a_rank_that_fails_ends_the_session(engine: Engine) -> None:
    engine.arrives = False
    engine.reply(prepare())
    waiting = engine.ask(Complete())
    engine.receive(0, 1)
    engine.receive(1, 1, error="checksum of 'a' differs")
    engine.go()
    assert "rank 1: checksum of 'a' differs" in engine.answer(waiting).message
    assert engine.scheduler.weight_version == "0"
    engine.receive(0, 2, done=True)  # late
    engine.go()
    assert engine.state == "idle"


@pytest.mark.parametrize("after", ["nothing", "a byte", "the call to complete"])
def test_each_timeout_of_a_session(engine: Engine, after: str) -> None:
    engine.arrives = False
    engine.reply(prepare(timeout_s=10.0, arm_timeout_s=50.0))
    engine.tick(5)
    waiting = None
    if after == "a byte":
        engine.receive(0, 0)
    elif after == "the call to complete":
        waiting = engine.ask(Complete())
    limit = 50.0 if after == "nothing" else 15.0
    assert engine.weights.next_deadline == limit
    engine.tick(limit - engine.now - 0.1)
    assert engine.state != "idle"
    engine.tick(0.1)
    assert engine.state == "idle"
    assert engine.weights.next_deadline is None
    if waiting is not None:
        assert "timeout_s=10" in engine.answer(waiting).message


def test_every_bucket_restarts_the_timeout(engine: Engine) -> None:
    engine.arrives = False
    engine.reply(prepare(timeout_s=10.0))
    for count in range(5):
        engine.receive(0, count)
        engine.tick(9)
    assert engine.state == "receiving"


# --- the commit ---


def test_a_commit_waits_for_the_step_in_flight_and_marks_tokens(engine: Engine) -> None:
    engine.sim.add("r", [1, 2, 3], max_new_tokens=6)
    engine.sim.launch()
    engine.sim.apply()
    engine.sim.launch()
    engine.reply(prepare(weight_version="v7"))
    waiting = engine.ask(Complete())
    assert engine.state == "committing" and engine.kinds() == ["Stage", "Receive"]
    assert engine.sim.launch() is None, "generation is held"
    engine.sim.apply()
    engine.go()
    assert engine.answer(waiting).fields["weight_version"] == "v7"
    engine.sim.run()
    assert engine.sim.finished["r"].versions == [("0", 0, 2), ("v7", 2, 6)]


def test_generation_goes_on_while_weights_arrive(engine: Engine) -> None:
    engine.arrives = False
    engine.sim.add("r", [1, 2, 3], max_new_tokens=6)
    engine.reply(prepare())
    engine.receive(0, 1)
    engine.sim.run()
    assert engine.sim.finished["r"].num_tokens == 6


@pytest.mark.parametrize("mode", ["wait", "in_place", "retract", "abort"])
@pytest.mark.parametrize("flush", [False, True])
def test_a_commit_does_not_change_a_pause_or_its_mode(engine: Engine, mode: str, flush: bool) -> None:
    engine.sim.add("r", [1, 2, 3], max_new_tokens=6)
    engine.sim.launch()
    engine.sim.apply()
    engine.pause(mode)
    engine.reply(prepare())
    assert engine.reply(Complete(flush_cache=flush)).success
    control = engine.scheduler.control
    assert control.mode == mode and list(control.holders) == ["user"]
    if mode in ("in_place", "wait"):
        assert bool(engine.scheduler.running) is not flush, "a flush retracts the request"
    assert (engine.scheduler.resources.prefix.num_pages == 0) or not flush
    control.continue_(Continue(99))
    engine.go()
    engine.sim.run()


def test_a_pause_during_the_commit_outlasts_it(engine: Engine) -> None:
    engine.silent.add(Commit)
    engine.reply(prepare())
    engine.ask(Complete())
    engine.pause("in_place")
    assert any(isinstance(other, Paused) for other in engine.others), "no step is in flight"
    engine.scheduler.control.flush(Flush(77), engine.now)
    for rank, command in engine.pending:
        engine.carry_out(rank, command)
    engine.go()
    assert engine.scheduler.weight_version == "1"
    assert engine.scheduler.control.mode == "in_place"
    assert any(isinstance(other, Flushed) for other in engine.others)


def test_no_step_runs_after_a_continue_during_the_commit(engine: Engine) -> None:
    engine.silent.add(Commit)
    engine.pause("in_place")
    engine.reply(prepare())
    waiting = engine.ask(Complete())
    engine.scheduler.control.continue_(Continue(99))
    engine.sim.add("r", [1, 2, 3], max_new_tokens=2)
    engine.go()
    assert engine.sim.launch() is None
    for rank, command in engine.pending:
        engine.carry_out(rank, command)
    engine.go()
    assert engine.answer(waiting).success
    engine.sim.run()


def test_kv_of_old_weights_is_not_shared_even_if_the_version_is_the_same(engine: Engine) -> None:
    def cached() -> int:
        engine.sim.add(f"r{engine.calls}", list(range(40)), max_new_tokens=2)
        engine.sim.run()
        return engine.sim.finished[f"r{engine.calls}"].cached_tokens

    assert cached() == 0
    engine.calls += 1
    assert cached() > 0
    engine.reply(prepare(weight_version="0"))
    assert engine.reply(Complete()).success and engine.scheduler.weight_version == "0"
    assert cached() == 0
    engine.reply(SetVersion(new_version="renamed"))
    assert cached() > 0, "a new version name does not change the weights"


def test_a_request_that_spans_a_commit_shares_no_more_pages(engine: Engine) -> None:
    engine.sim.add("r", list(range(20)), max_new_tokens=30)
    engine.sim.launch()
    engine.sim.apply()
    before = engine.scheduler.resources.prefix.num_pages
    engine.reply(prepare())
    engine.reply(Complete())
    engine.sim.run()
    assert engine.scheduler.resources.prefix.num_pages == before


def test_abort_all_ends_every_request(engine: Engine) -> None:
    engine.sim.add("r", [1, 2, 3], max_new_tokens=6)
    engine.sim.launch()
    engine.sim.apply()
    assert engine.reply(UpdateFromDisk(model_path="p", abort_all_requests=True)).success
    assert engine.sim.finished["r"].reason == "abort"


def test_receiving_requires_a_pause_with_weight_recv_requires_pause() -> None:
    engine = Engine(weight_recv_requires_pause=True)
    engine.reply(join(GROUP))
    for request in (prepare(), single(PART)):
        answer = engine.reply(request)
        assert not answer.success and "--weight-recv-requires-pause" in answer.message
    assert engine.reply(UpdateFromDisk(model_path="p")).success, "a checkpoint is not received"
    engine.pause("in_place")
    assert engine.reply(prepare()).success
    assert engine.reply(Complete()).success


# --- poisoned ---


def test_a_commit_that_fails_after_a_rank_has_written_poisons_the_weights(engine: Engine) -> None:
    engine.sim.add("r", [1, 2, 3], max_new_tokens=6)
    engine.sim.launch()
    engine.sim.apply()
    engine.broken[1, Commit] = ["out of memory"]
    engine.touched = {0}
    engine.reply(prepare())
    assert not engine.reply(Complete()).success
    assert engine.state == "poisoned"
    assert engine.sim.finished["r"].reason == "abort"
    rejected = engine.scheduler.add(
        AddRequest(rid="s", prompt=pack_ids([1]), params=SamplingParams(max_new_tokens=1)), engine.now
    )
    assert (
        isinstance(rejected, Rejected)
        and rejected.kind == "PoisonedError"
        and "out of memory" in rejected.message
    )
    engine.broken = {}
    assert "poisoned" in engine.reply(prepare(PART)).message, "a partial update is refused"
    assert "poisoned" in engine.reply(BeginUpdate()).message
    engine.reply(prepare())
    assert engine.reply(Complete()).success
    assert engine.state == "idle"
    engine.sim.add("t", [1, 2, 3], max_new_tokens=2)
    engine.sim.run()


def test_a_checkpoint_replaces_poisoned_weights(engine: Engine) -> None:
    engine.broken[0, Commit] = ["no"]
    engine.reply(prepare())
    engine.reply(Complete())
    assert engine.state == "poisoned"
    engine.broken = {}
    assert engine.reply(UpdateFromDisk(model_path="p")).success
    assert engine.state == "idle"


def test_a_commit_that_fails_before_it_writes_leaves_the_served_weights(engine: Engine) -> None:
    engine.broken = {(0, Commit): ["no"], (1, Commit): ["no"]}
    engine.touched = set()
    engine.reply(prepare())
    answer = engine.reply(Complete())
    assert not answer.success and answer.message == "no"
    assert engine.state == "idle" and engine.scheduler.weight_version == "0"


# --- single calls ---


def test_a_single_call_receives_and_commits(engine: Engine) -> None:
    answer = engine.reply(single(PART))
    assert answer.success and engine.kinds() == ["Stage", "Receive", "Commit"]
    assert engine.reply(single(PART, weight_version="9")).success
    assert engine.reply(single(PART, weight_version="9")).success
    assert engine.scheduler.weight_version == "9"
    assert engine.reply(single(PART)).fields["weight_version"] == "10"


def test_a_wrong_single_call_receives_and_drops_the_tensors(engine: Engine) -> None:
    engine.broken[0, Stage] = ["unknown tensor 'a'"]
    engine.silent.add(Stage)
    call = engine.ask(single(PART))
    first, engine.pending = engine.pending, []
    for rank, command in first:
        engine.carry_out(rank, command)
    engine.broken, engine.silent = {}, set()
    engine.go()
    answer = engine.answer(call)
    assert not answer.success and "unknown tensor 'a'" in answer.message
    stages = [command for command in engine.done if isinstance(command, Stage)]
    assert [stage.manifest.discard for stage in stages] == [False, True]
    assert engine.kinds() == ["Stage", "Stage", "Receive"], "nothing is committed"


def test_a_single_call_that_cannot_be_received_is_refused_at_once(engine: Engine) -> None:
    engine.broken[0, Stage] = ["three names, two shapes"]
    answer = engine.reply(single(PART))
    assert not answer.success and "three names, two shapes" in answer.message
    assert engine.state == "idle"


def test_calls_between_begin_and_end_are_committed_together(engine: Engine) -> None:
    assert engine.reply(BeginUpdate()).success
    assert engine.reply(single(PART)).success
    assert engine.reply(UpdateFromTensor(serialized_named_tensors=["x"], weight_version="5")).success
    takes = [command for command in engine.done if isinstance(command, Take)]
    assert all(take.copy for take in takes), "the client may overwrite its tensors"
    assert engine.scheduler.weight_version == "0"
    assert len({c.session for c in engine.done if isinstance(c, Stage | Take)}) == 1
    assert engine.reply(EndUpdate()).success
    assert engine.scheduler.weight_version == "5"
    assert engine.weights.machine.notice().num_committed == 1


def test_begin_and_end_without_calls_in_between_change_nothing(engine: Engine) -> None:
    engine.reply(BeginUpdate())
    assert engine.reply(EndUpdate()).success
    assert engine.scheduler.weight_version == "0"
    assert not engine.reply(EndUpdate()).success


def test_one_wrong_call_fails_its_whole_group_of_calls(engine: Engine) -> None:
    engine.reply(BeginUpdate())
    assert engine.reply(single(PART)).success
    engine.broken[1, Take] = ["not a tensor"]
    assert not engine.reply(UpdateFromTensor(serialized_named_tensors=["x", "y"])).success
    engine.broken = {}
    engine.kinds()
    for request in (
        UpdateFromTensor(serialized_named_tensors=["x"]),
        UpdateFromDisk(model_path="p"),
        prepare(),
        BeginUpdate(),
    ):
        answer = engine.reply(request)
        assert (
            not answer.success and "not a tensor" in answer.message and "/end_weight_update" in answer.message
        )
    assert not engine.reply(single(PART)).success
    assert engine.kinds() == ["Stage", "Receive"], "a client that may be sending already can finish"
    assert not engine.reply(EndUpdate()).success
    assert engine.scheduler.weight_version == "0"
    assert engine.reply(UpdateFromTensor(serialized_named_tensors=["x"])).success


@pytest.mark.parametrize(
    "call, text",
    [
        (
            UpdateFromDisk(model_path="p", load_format="pt"),
            "load_format is 'pt'; use null or one of auto, safetensors, gguf, dummy",
        ),
        (
            UpdateFromTensor(serialized_named_tensors=["x"], load_format="sharded"),
            "load_format is 'sharded'; use null or 'flattened_bucket'",
        ),
    ],
    ids=["disk", "tensor"],
)
def test_a_call_with_a_wrong_load_format_fails_its_whole_group_of_calls(
    engine: Engine, call: UpdateFromDisk | UpdateFromTensor, text: str
) -> None:
    engine.reply(BeginUpdate())
    assert engine.reply(single(PART)).success
    answer = engine.reply(call)
    assert not answer.success and answer.message == text
    answer = engine.reply(EndUpdate())
    assert not answer.success and text in answer.message
    assert engine.scheduler.weight_version == "0", "what the calls before it brought is not committed"


def test_a_group_of_calls_that_is_never_ended_is_given_up(engine: Engine) -> None:
    engine.reply(BeginUpdate())
    assert engine.reply(single(PART)).success
    engine.tick(3600)
    assert not engine.reply(single(PART)).success
    assert engine.reply(AbortSession()).success
    assert engine.reply(single(PART)).success


def test_the_figures_of_a_group_of_calls_cover_all_its_calls(engine: Engine) -> None:
    engine.reply(BeginUpdate())
    engine.tick(5)
    engine.reply(single(PART))
    engine.reply(single(PART))
    figures = engine.reply(EndUpdate()).fields
    assert (figures["num_buckets_received"], figures["num_bytes"]) == (4, 32)
    assert figures["timings"]["receive_s"] == 0


def test_the_figures_of_a_group_of_calls_cover_payloads_too(engine: Engine) -> None:
    engine.reply(BeginUpdate())
    for request in (single(PART), UpdateFromTensor(serialized_named_tensors=["x"]), single(PART)):
        engine.reply(request)
    assert engine.reply(UpdateFromTensor(serialized_named_tensors=["x"])).fields["num_bytes"] == 42
    assert engine.reply(EndUpdate()).fields["num_bytes"] == 16 + 5 + 16 + 5


def test_a_version_that_is_a_long_number_is_incremented(engine: Engine) -> None:
    engine.reply(SetVersion(new_version="9" * 200))
    assert engine.reply(UpdateFromTensor(serialized_named_tensors=["x"])).success
    assert engine.scheduler.weight_version == "1" + "0" * 200


def test_requests_are_not_rejected_during_a_commit() -> None:
    engine = Engine(paused_policy="reject")
    engine.reply(join(GROUP))
    engine.silent.add(Commit)
    engine.reply(prepare())
    engine.ask(Complete())
    assert engine.state == "committing"
    engine.sim.add("r", [1, 2, 3], max_new_tokens=2)  # asserts that the request is accepted
    engine.pause("in_place")
    rejected = engine.scheduler.add(
        AddRequest(rid="s", prompt=pack_ids([1]), params=SamplingParams(max_new_tokens=1)), engine.now
    )
    assert isinstance(rejected, Rejected) and rejected.kind == "PausedError"


def test_a_partial_single_call_on_poisoned_weights_is_received_and_dropped(engine: Engine) -> None:
    engine.broken[0, Commit] = ["no"]
    engine.reply(prepare())
    engine.reply(Complete())
    engine.broken = {}
    engine.kinds()
    answer = engine.reply(single(PART))
    assert not answer.success and "poisoned" in answer.message
    assert engine.kinds() == ["Stage", "Receive"]


def test_generation_goes_on_while_a_checkpoint_is_read(engine: Engine) -> None:
    engine.sim.add("r", [1, 2, 3], max_new_tokens=4)
    engine.silent.add(Load)
    call = engine.ask(UpdateFromDisk(model_path="new"))
    engine.sim.run()
    assert engine.sim.finished["r"].num_tokens == 4
    for rank, command in engine.pending:
        engine.carry_out(rank, command)
    engine.go()
    assert engine.answer(call).success
    notice = engine.weights.machine.notice()
    assert (notice.model_path, notice.version) == ("new", "1")


def test_reading_a_checkpoint_has_a_longer_timeout_than_receiving_a_single_call(engine: Engine) -> None:
    engine.silent = {Load, Receive}
    engine.ask(UpdateFromDisk(model_path="new"))
    engine.tick(1000)
    assert engine.state == "posting"
    engine.reply(AbortSession())
    call = engine.ask(single(PART))
    engine.tick(300)
    assert "nothing was received" in engine.answer(call).message


def test_a_bad_checkpoint_changes_nothing(engine: Engine) -> None:
    engine.broken[0, Load] = engine.broken[1, Load] = ["no such directory"]
    answer = engine.reply(UpdateFromDisk(model_path="new"))
    assert not answer.success and answer.message == "no such directory"
    assert engine.weights.machine.notice().model_path is None


def test_each_rank_gets_its_payload_or_the_common_one(engine: Engine) -> None:
    engine.reply(UpdateFromTensor(serialized_named_tensors=["x", "y"]))
    assert engine.reply(UpdateFromTensor(serialized_named_tensors=["x"])).success, "one payload for all ranks"
    answer = engine.reply(UpdateFromTensor(serialized_named_tensors=["x"] * 3))
    assert not answer.success and "has 3 entries" in answer.message


def test_an_inspection_merges_the_replies_of_all_ranks(engine: Engine) -> None:
    answer = engine.reply(CheckWeights(action="checksum"))
    assert answer.success and answer.fields == {"checksums": {"a": 3}, "total": 3, "ranks": [1, 2]}
    engine.broken[1, Inspect] = ["nothing was remembered"]
    assert not engine.reply(CheckWeights(action="compare")).success


def test_the_frontend_gets_a_notice_of_every_phase(engine: Engine) -> None:
    engine.others.clear()
    engine.reply(prepare())
    engine.reply(Complete())
    states = [other.state for other in engine.others if isinstance(other, WeightNotice)]
    assert states == ["posting", "prepared", "receiving", "received", "committing", "idle"]


# --- joining groups ---


def other(name: str, **fields: Any) -> JoinGroup:
    return join(structs.replace(GROUP, name=name, **fields), timeout_s=10.0)


def give_up(engine: Engine) -> None:
    """Let the ranks reply to the pending joins with an error, as they do after a ``StopJoin``."""
    engine.broken = {(rank, Join): ["it was given up"] for rank in (0, 1)}
    engine.silent.clear()
    engine.tick(0.0)
    engine.broken = {}


def test_calls_for_the_same_group_share_one_join(engine: Engine) -> None:
    engine.silent = {Join}
    calls = [engine.ask(other("h")) for _ in range(400)]
    assert engine.kinds() == ["Join"]
    assert not any(call in engine.answers for call in calls)
    engine.silent.clear()
    engine.tick(0.0)
    assert all(engine.answer(call).success for call in calls)
    assert "h" in engine.weights.groups.joined


def test_the_number_of_joins_in_progress_is_limited(engine: Engine) -> None:
    engine.silent = {Join}
    for index in range(4):
        engine.ask(other(f"h{index}"))
    for _ in range(400):
        answer = engine.reply(other("h4", master_port=7))
        assert not answer.success and "the limit is 4" in answer.message
        assert all(f"'h{index}' at localhost:1" in answer.message for index in range(4))
    assert engine.kinds() == ["Join"] * 4
    engine.ask(other("h0"))  # shares the join in progress
    engine.ask(other("h1", master_port=7))  # the ranks give up the older join for this one
    assert engine.kinds() == ["Join"]
    give_up(engine)
    assert engine.reply(other("h4")).success


def test_a_join_that_no_call_waits_for_is_stopped(engine: Engine) -> None:
    engine.silent = {Join}
    first, second = engine.ask(other("h")), engine.ask(other("h"))
    engine.weights.withdraw(first)
    engine.weights.withdraw(12345)
    engine.tick(0.0)
    assert engine.kinds() == ["Join"]
    engine.weights.withdraw(second)
    engine.tick(0.0)
    assert engine.kinds() == ["StopJoin"]
    engine.tick(0.0)
    assert engine.kinds() == [], "a join is stopped only once"
    again = engine.ask(other("h"))
    assert engine.kinds() == ["Join"], "a stopped join is not shared"
    give_up(engine)
    assert not engine.answer(again).success
    assert first not in engine.answers and second not in engine.answers
    assert "h" not in engine.weights.groups.joined


def test_a_join_call_ends_at_its_own_deadline(engine: Engine) -> None:
    engine.silent = {Join}
    long, short = engine.ask(other("h")), engine.ask(structs.replace(other("h"), timeout_s=2.0))
    assert engine.weights.next_deadline is not None
    engine.tick(3.1)
    assert "within 2 s" in engine.answer(short).message
    assert long not in engine.answers and engine.kinds() == ["Join"]
    engine.tick(8.0)
    assert "within 10 s" in engine.answer(long).message
    assert engine.kinds() == ["StopJoin"]
    assert engine.weights.next_deadline is None
    give_up(engine)


def test_a_group_that_was_joined_although_its_client_has_gone_is_kept(engine: Engine) -> None:
    engine.silent = {Join}
    engine.weights.withdraw(engine.ask(other("h")))
    engine.tick(0.0)
    engine.silent.clear()
    engine.tick(0.0)
    assert "h" in engine.weights.groups.joined
    assert engine.reply(other("h")).success


# --- resets ---

RESET = CheckWeights(action="reset_tensors")


def test_weights_are_reset_when_nothing_runs_and_requests_wait_for_all_of_them(engine: Engine) -> None:
    engine.sim.add("a", [1, 2, 3], max_new_tokens=5)
    engine.sim.launch()
    call = engine.ask(RESET)
    assert engine.kinds() == [], "a step is in flight"
    assert "being reset" in engine.reply(prepare()).message
    twice = engine.ask(RESET)
    engine.sim.apply()
    engine.go()
    assert engine.kinds() == ["Inspect"], "both calls are one reset"
    assert engine.answer(call).success and engine.answer(twice).success
    scheduler = engine.scheduler
    assert not scheduler.running and scheduler.plan(engine.now) is None
    assert "overwritten" in str(scheduler.weights.missing) and not scheduler.weights.is_updating

    def let_go() -> bool:
        scheduler.standby.advance()
        return not scheduler.control.holders

    assert not let_go()
    engine.fields[Commit] = {"num_missing": 2, "missing": "b"}
    assert engine.reply(single(PART)).success and not let_go()
    assert "2, such as 'b'" in str(scheduler.weights.missing)
    del engine.fields[Commit]
    assert engine.reply(single(PART)).success and let_go()
    assert scheduler.weights.missing is None
    engine.sim.run()


def test_a_rank_that_fails_at_a_reset_leaves_the_weights_unknown(engine: Engine) -> None:
    engine.broken[1, Inspect] = ["no"]
    answer = engine.reply(RESET)
    assert not answer.success and "rank 1: no" in answer.message
    assert engine.scheduler.weights.missing and engine.scheduler.control.holders
    engine.broken.clear()
    assert engine.reply(RESET).success, "it can be asked for again"


def test_no_reset_during_an_update_nor_of_shared_weights(engine: Engine) -> None:
    assert engine.reply(BeginUpdate()).success
    assert "is open" in engine.reply(RESET).message
    assert engine.reply(EndUpdate()).success
    engine.scheduler.weights.shares_weights = True
    assert "--gms-dir" in engine.reply(RESET).message
    assert engine.scheduler.weights.missing is None and engine.kinds() == []


def test_the_end_of_a_group_of_calls_names_the_version(engine: Engine) -> None:
    engine.reply(BeginUpdate())
    refused = engine.reply(EndUpdate(weight_version="x"))
    assert not refused.success and "/update_weight_version" in refused.message
    engine.reply(BeginUpdate())
    assert engine.reply(single(PART, weight_version="in the call")).success
    assert engine.reply(EndUpdate(weight_version="at the end")).fields["weight_version"] == "at the end"
