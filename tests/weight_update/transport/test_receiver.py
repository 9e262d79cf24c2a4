import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from segue.messages.weight_operations import Bucket, Group, Manifest
from segue.weight_update.transport.group import JoinedGroup
from segue.weight_update.transport.joining import Groups
from segue.weight_update.transport.receiver import Receiver
from tests.conftest import WaitUntil
from tests.weight_update.conftest import in_thread, join
from tests.weight_update.trainer import content

Tensors = list[tuple[str, str, list[int]]]
NewGroup = Callable[..., Group]
BUCKETS: list[Tensors] = [
    [("embed", "bfloat16", [33, 5]), ("scale", "float32", []), ("nothing", "bfloat16", [0, 4])],
    [],
    [("odd", "uint8", [3]), ("at_odd_offset", "float32", [7]), ("after_it", "bfloat16", [9])],
    [("large", "float32", [300, 100])],
    [("ids", "int64", [4]), ("flags", "bool", [2])],
]


class Kept:
    """A sink that keeps copies."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def direct(self, name: str) -> Tensor | None:
        raise AssertionError("asked for on CUDA only")

    def store(self, name: str, tensor: Tensor) -> None:
        self.tensors[name] = tensor.clone()


class Observer:
    """A receiver, and a record of its callbacks."""

    def __init__(self, group: JoinedGroup, buckets: list[Tensors], sink: Any = None, **options: Any) -> None:
        self.sink = Kept() if sink is None else sink
        self.ready = threading.Event()
        self.progress: list[tuple[int, int]] = []
        self.done: list[str | None] = []
        self._ended = threading.Event()
        gloo_timeout_s = options.pop("gloo_timeout_s", 86_400.0)
        self.receiver = Receiver(
            group,
            manifest(group.group.name, buckets, **options),
            self.sink,
            on_ready=self.ready.set,
            on_progress=lambda *now: self.progress.append(now),
            on_done=self._done,
            gloo_timeout_s=gloo_timeout_s,
        )

    def _done(self, error: str | None) -> None:
        self.done.append(error)
        self._ended.set()

    def end(self, seconds: float = 30.0) -> str | None:
        """Wait until the session has ended and its memory is free; returns its error."""
        assert self._ended.wait(seconds), "the session did not end"
        assert self.receiver.idle.wait(60), "the receiver's thread did not end"
        assert len(self.done) == 1
        return self.done[0]


def manifest(name: str, buckets: list[Tensors], **options: Any) -> Manifest:
    columns = [[list(column) for column in zip(*bucket, strict=True)] or [[], [], []] for bucket in buckets]
    return Manifest(
        group_name=name,
        buckets=[Bucket(names=names, dtypes=dtypes, shapes=shapes) for names, dtypes, shapes in columns],
        **options,
    )


def same(left: Tensor, right: Tensor) -> bool:
    return (left.dtype, left.shape) == (right.dtype, right.shape) and left.reshape(-1).view(
        torch.uint8
    ).equal(right.reshape(-1).view(torch.uint8))


def assert_received(found: dict[str, Tensor], buckets: list[Tensors]) -> None:
    assert list(found) == [name for bucket in buckets for name, _, _ in bucket]
    for bucket in buckets:
        for name, dtype, shape in bucket:
            assert same(found[name], content(name, dtype, shape)), name


@pytest.fixture
def joined(trainer: Any, groups: Groups, new_group: NewGroup) -> JoinedGroup:
    group: JoinedGroup = trainer.meet(groups, new_group())
    return group


@pytest.mark.parametrize("flattened", [False, True])
def test_all_tensors_arrive(trainer: Any, joined: JoinedGroup, flattened: bool) -> None:
    session = Observer(joined, BUCKETS, flattened=flattened)
    assert session.ready.wait(60)
    trainer.send(joined.group, BUCKETS, flattened=flattened)
    assert session.end() is None
    assert_received(session.sink.tensors, BUCKETS)
    sizes = [sum(content(*tensor).nbytes for tensor in bucket) for bucket in BUCKETS]
    assert session.progress[-1] == (len(BUCKETS), sum(sizes))
    assert session.progress[0][0] == 0 < session.progress[0][1]
    assert [buckets for buckets, _ in session.progress] == sorted(b for b, _ in session.progress)
    assert joined.alive
    assert "error" not in trainer.answer()


@pytest.mark.parametrize("flattened", [False, True])
def test_a_broadcast_that_began_before_the_receive_arrives(
    trainer: Any, joined: JoinedGroup, flattened: bool
) -> None:
    trainer.send(joined.group, BUCKETS, flattened=flattened)
    session = Observer(joined, BUCKETS, flattened=flattened)
    assert session.end() is None
    assert_received(session.sink.tensors, BUCKETS)


@pytest.mark.parametrize(
    ("sent", "word"), [(10, "less"), (99_992, "less"), (100_001, "more"), (1 << 20, "more")]
)
def test_a_broadcast_of_another_size_than_in_the_manifest_is_an_error(
    trainer: Any, joined: JoinedGroup, sent: int, word: str
) -> None:
    session = Observer(joined, [[("first", "uint8", [8])], [("second", "uint8", [100_000])]], flattened=True)
    trainer.send(joined.group, [[("first", "uint8", [8])], [("second", "uint8", [sent])]], flattened=True)
    error = session.end()
    assert error is not None
    assert f"broadcast {word} than the 100000 bytes that its manifest says ('second')" in error
    assert not joined.alive
    assert list(session.sink.tensors) == ["first"]


@pytest.mark.parametrize("buckets", [[], [[], []]])
def test_a_manifest_without_tensors_is_received_at_once(joined: JoinedGroup, buckets: list[Tensors]) -> None:
    session = Observer(joined, buckets)
    assert session.end() is None
    assert session.ready.is_set()
    assert session.progress == ([(len(buckets), 0)] if buckets else [])
    assert joined.alive


def test_a_discarded_manifest_is_received_and_dropped(trainer: Any, joined: JoinedGroup) -> None:
    session = Observer(joined, BUCKETS, discard=True)
    trainer.send(joined.group, BUCKETS, flattened=False)
    assert session.end() is None
    assert session.sink.tensors == {}
    assert "error" not in trainer.answer()
    assert joined.alive


def test_a_session_with_a_posted_receive_can_be_cancelled(
    trainer: Any, joined: JoinedGroup, num_threads: Callable[[], int], wait_until: WaitUntil
) -> None:
    threads = num_threads()
    session = Observer(joined, BUCKETS)
    assert session.ready.wait(60)
    session.receiver.end("no longer wanted")  # nobody sends: what is not cancelled would wait for ever
    assert session.end(60) == "no longer wanted"
    assert not joined.alive
    wait_until(lambda: num_threads() <= threads, what="the receive's threads ended")
    trainer.send(joined.group, BUCKETS, flattened=False)
    assert "error" in trainer.answer()  # it does not hang


def test_cancelling_an_ended_session_changes_nothing(trainer: Any, joined: JoinedGroup) -> None:
    session = Observer(joined, BUCKETS)
    trainer.send(joined.group, BUCKETS, flattened=False)
    assert session.end() is None
    session.receiver.end()
    assert session.done == [None]
    assert joined.alive


def test_a_session_is_cancelled_in_the_middle_of_its_broadcasts(
    trainer: Any, joined: JoinedGroup, wait_until: WaitUntil
) -> None:
    session = Observer(joined, BUCKETS, flattened=True)
    trainer.send(joined.group, BUCKETS[:1], flattened=True)
    wait_until(lambda: bool(session.progress) and session.progress[-1][0] == 1, what="one bucket")
    session.receiver.end("its deadline is over")
    assert session.end(60) == "its deadline is over"
    assert not joined.alive


@pytest.mark.parametrize("flattened", [False, True])
def test_a_trainer_killed_in_a_broadcast_ends_the_session_and_another_one_is_joined(
    new_trainer: Any, groups: Groups, new_group: NewGroup, flattened: bool, wait_until: WaitUntil
) -> None:
    group = new_group()
    first = new_trainer()
    joined = first.meet(groups, group)
    large: list[Tensors] = [[("first", "uint8", [1 << 20])], [("second", "uint8", [16 << 20])]]
    first.make(large, flattened=flattened)
    first.begin("send", name=group.name)
    killed: list[float] = []

    class Kills(Kept):
        def store(self, name: str, tensor: Tensor) -> None:
            first.kill()  # while the second broadcast is in flight
            killed.append(time.monotonic())
            super().store(name, tensor)

    session = Observer(joined, large, Kills(), flattened=flattened, gloo_timeout_s=6.0)
    error = session.end(60)
    assert error is not None
    assert error.startswith("the connection to the trainer was lost")
    assert time.monotonic() - killed[0] < 4.5, "it is noticed before the broadcast takes too long"
    assert not joined.alive
    assert list(session.sink.tensors) == ["first"]
    wait_until(
        lambda: not any(thread.name.startswith("receive-weights") for thread in threading.enumerate()),
        what="no thread of the receive left",
    )

    second = new_trainer()
    joined = second.meet(groups, group)
    session = Observer(joined, BUCKETS, flattened=flattened)
    second.send(group, BUCKETS, flattened=flattened)
    assert session.end() is None
    assert_received(session.sink.tensors, BUCKETS)


def test_a_trainer_killed_before_its_first_broadcast_ends_the_session(
    new_trainer: Any, groups: Groups, new_group: NewGroup
) -> None:
    trainer = new_trainer()
    joined = trainer.meet(groups, new_group())
    session = Observer(joined, BUCKETS)
    assert session.ready.wait(60)
    trainer.kill()
    error = session.end(1)
    assert error is not None
    assert error.startswith("the connection to the trainer was lost")


def test_a_sink_that_fails_ends_the_session_and_frees_the_trainer(trainer: Any, joined: JoinedGroup) -> None:
    class Full(Kept):
        def store(self, name: str, tensor: Tensor) -> None:
            raise RuntimeError("no space left")

    session = Observer(joined, BUCKETS, Full())
    trainer.send(joined.group, BUCKETS * 3, flattened=False)
    assert session.end() == "no space left"
    assert not joined.alive
    trainer.answer()


@pytest.fixture
def three_ranks(trainer: Any, new_group: NewGroup) -> Iterator[list[JoinedGroup]]:
    """Three engine ranks of one group: gloo forwards broadcasts from the first to the third."""
    group = new_group(world_size=4)
    ranks = [Groups(torch.device("cpu")) for _ in range(3)]
    trainer.host(group)
    joining = [in_thread(partial(join, rank, group, number, 30)) for number, rank in enumerate(ranks)]
    for thread in joining:
        thread.join(60)
    assert trainer.answer() == {}
    joined = [rank.get(group.name) for rank in ranks]
    yield [group for group in joined if group is not None]
    for rank in ranks:
        rank.close()


@pytest.mark.parametrize("flattened", [False, True])
def test_all_ranks_receive(trainer: Any, three_ranks: list[JoinedGroup], flattened: bool) -> None:
    sessions = [Observer(group, BUCKETS, flattened=flattened) for group in three_ranks]
    trainer.send(three_ranks[0].group, BUCKETS, flattened=flattened)
    assert [session.end() for session in sessions] == [None] * 3
    for session in sessions:
        assert_received(session.sink.tensors, BUCKETS)


def test_an_inner_rank_of_gloos_tree_forwards_exactly_the_manifests_bytes(
    trainer: Any, three_ranks: list[JoinedGroup]
) -> None:
    buckets: list[Tensors] = [[("large", "uint8", [1000])], [("small", "uint8", [10])]]
    sessions = [Observer(group, buckets) for group in three_ranks[:2]]
    trainer.send(three_ranks[0].group, buckets, flattened=False)
    for bucket in buckets:
        ((name, dtype, shape),) = bucket
        exact = torch.zeros(shape, dtype=torch.uint8)
        three_ranks[2].process_group.broadcast(exact, 0).wait()
        assert same(exact, content(name, dtype, shape))
    assert [session.end() for session in sessions] == [None] * 2


def test_all_ranks_notice_a_killed_trainer(trainer: Any, three_ranks: list[JoinedGroup]) -> None:
    sessions = [Observer(group, BUCKETS) for group in three_ranks]
    assert all(session.ready.wait(60) for session in sessions)
    trainer.kill()
    for session in sessions:
        error = session.end(60)
        assert error is not None
        assert error.startswith("the connection to the trainer was lost")


def test_a_trainer_may_end_before_its_broadcasts_are_stored(trainer: Any, joined: JoinedGroup) -> None:
    class Slow(Kept):
        def store(self, name: str, tensor: Tensor) -> None:
            if not self.tensors:
                trainer.answer()
                trainer.kill()
                threading.Event().wait(1.2)  # longer than it takes to notice a trainer's end
            super().store(name, tensor)

    buckets = [BUCKETS[0][:2]]
    session = Observer(joined, buckets, Slow())
    trainer.send(joined.group, buckets, flattened=False)
    assert session.end() is None
    assert_received(session.sink.tensors, buckets)


def test_the_process_may_end_while_a_receive_is_posted(trainer: Any, new_group: NewGroup) -> None:
    program = """
import sys, threading, torch
from segue.messages.weight_operations import Bucket, Group, Manifest
from segue.weight_update.transport.joining import Groups
from segue.weight_update.transport.receiver import Receiver
groups, ready = Groups(torch.device("cpu")), threading.Event()
group = Group(name="weights", master_address="127.0.0.1", master_port=int(sys.argv[1]), rank_offset=1,
              world_size=2, backend="gloo")
groups.wait(groups.start(group, 0, 30), 30)
buckets = [Bucket(names=["w"], dtypes=["uint8"], shapes=[[9]])]
Receiver(groups.get("weights"), Manifest(group_name="weights", buckets=buckets), None,
         on_ready=ready.set, on_progress=lambda *_: None, on_done=lambda _: None)
ready.wait(60)
groups.close()
"""
    group = new_group()
    trainer.host(group)
    subprocess.run([sys.executable, "-c", program, str(group.master_port)], check=True, timeout=60)


def test_a_dead_group_receives_nothing(joined: JoinedGroup) -> None:
    joined.mark_dead("for a test")
    error = Observer(joined, BUCKETS).end()
    assert error is not None
    assert "is dead: for a test" in error


def share_of_a_core() -> float:
    """Returns the share of one core that this process uses, measured over a second."""
    used, began = time.process_time(), time.monotonic()
    threading.Event().wait(1.0)
    return (time.process_time() - used) / (time.monotonic() - began)


def test_a_posted_receive_uses_no_processor_time(joined: JoinedGroup) -> None:
    before = min(share_of_a_core() for _ in range(2))  # servers of other tests may run in this process
    session = Observer(joined, BUCKETS)
    assert session.ready.wait(60)
    deadline = time.monotonic() + 15.0
    share = 1.0
    while share >= 0.02 and time.monotonic() < deadline:
        share = share_of_a_core() - before
    assert share < 0.02, f"{share:.1%} of a core"
    session.receiver.end()
    session.end()


def many_rounds(
    trainer: Any, joined: JoinedGroup, rounds: int, delays: tuple[float, ...], num_buckets: int = 10
) -> None:
    buckets: list[Tensors] = [[(f"w{i}", "bfloat16", [64, 16])] for i in range(num_buckets)]
    for number in range(rounds):
        flattened = number % 2 == 0
        session = Observer(joined, buckets, flattened=flattened)
        assert session.ready.wait(60)
        trainer.send(joined.group, buckets, flattened=flattened, after=delays[number % len(delays)])
        assert session.end() is None
        assert "error" not in trainer.answer()
    assert_received(session.sink.tensors, buckets)


def test_rounds_never_hang_and_leak_no_threads_and_no_files(
    trainer: Any, joined: JoinedGroup, num_threads: Callable[[], int], wait_until: WaitUntil
) -> None:
    many_rounds(trainer, joined, 2, (0.0,))
    threads, files = num_threads(), len(os.listdir("/proc/self/fd"))
    many_rounds(trainer, joined, 50, (0.0, 0.0, 0.0, 0.0, 0.05))
    wait_until(lambda: num_threads() <= threads, what="as many threads as before")
    assert len(os.listdir("/proc/self/fd")) <= files


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_rounds_at_once_and_after_five_seconds(trainer: Any, joined: JoinedGroup) -> None:
    many_rounds(trainer, joined, 100, (0.0, 5.0), num_buckets=73)
