import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from segue.errors import WeightSyncError
from segue.protocol.weights import Group
from segue.trainer.group import Group as SendingGroup
from segue.weights.sync.groups import Groups
from segue.weights.sync.joined import ANNOUNCED_KEY, JoinedGroup, prefixed
from tests.conftest import WaitUntil
from tests.weights.sync.conftest import in_thread
from tests.weights.sync.trainer import host

NewGroup = Callable[..., Group]


def test_a_group_is_met(trainer: Any, groups: Groups, new_group: NewGroup) -> None:
    joined = trainer.meet(groups, new_group())
    assert joined.alive
    assert joined.device.type == "cpu"
    assert (joined.process_group.rank(), joined.process_group.size()) == (1, 2)


def test_the_same_parameters_again_are_no_news(trainer: Any, groups: Groups, new_group: NewGroup) -> None:
    group = new_group()
    joined = trainer.meet(groups, group)
    groups.join(group, 0, 5)
    assert groups.get(group.name) is joined


def test_other_parameters_under_a_live_name_are_refused(
    trainer: Any, groups: Groups, new_group: NewGroup
) -> None:
    trainer.meet(groups, new_group())
    with pytest.raises(WeightSyncError, match=r"joined already, with other parameters .* destroy it first"):
        groups.join(new_group(), 0, 5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank_offset": 0}, "rank 0 of world_size 2"),
        ({"rank_offset": 2}, "rank 2 of world_size 2"),
        ({"master_port": 70000}, "master_port 70000"),
        ({"backend": "nccl"}, "needs an engine on CUDA"),
    ],
)
def test_parameters_that_cannot_work_are_refused_at_once(
    groups: Groups, new_group: NewGroup, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(WeightSyncError, match=message):
        groups.join(new_group(**fields), 0, 30)


def test_joining_nobody_ends_at_the_deadline(groups: Groups, new_group: NewGroup) -> None:
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"not met within 0\.5 s"):
        groups.join(new_group(), 0, 0.5)
    assert time.monotonic() - began < 1.5


def test_a_join_is_retried_after_a_failure(trainer: Any, groups: Groups, new_group: NewGroup) -> None:
    group = new_group()
    with pytest.raises(WeightSyncError):
        groups.join(group, 0, 0.2)
    assert trainer.meet(groups, group).alive


def test_a_trainer_whose_others_are_missing_is_left_at_the_deadline(
    trainer: Any, groups: Groups, new_group: NewGroup, num_threads: Callable[[], int], wait_until: WaitUntil
) -> None:
    group = new_group(world_size=3)
    before = num_threads()
    trainer.host(group)
    with pytest.raises(WeightSyncError, match="was not met within 1 s"):
        groups.join(group, 0, 1.0)
    wait_until(lambda: num_threads() <= before, what="no thread of the attempt left")


def test_a_dead_trainers_group_is_replaced(new_trainer: Any, groups: Groups, new_group: NewGroup) -> None:
    group = new_group()
    first = new_trainer()
    old = first.meet(groups, group)
    first.kill()
    new = new_trainer().meet(groups, group)
    assert new is not old
    assert new.alive
    assert not old.alive


def test_a_group_that_was_left_is_gone(trainer: Any, groups: Groups, new_group: NewGroup) -> None:
    group = new_group()
    joined = trainer.meet(groups, group)
    groups.leave(group.name)
    assert groups.get(group.name) is None
    assert not joined.alive
    with pytest.raises(WeightSyncError, match="is dead: it was left"):
        _ = joined.process_group
    with pytest.raises(WeightSyncError, match="no group 'weights'"):
        groups.leave(group.name)


def test_a_trainer_in_the_same_process_may_host_the_group(groups: Groups, new_group: NewGroup) -> None:
    group = new_group()
    hosted: list[Any] = []
    hosting = in_thread(lambda: hosted.append(host(group.master_port, group.name, 2)))
    groups.join(group, 0, 30)
    hosting.join(30)
    joined = groups.get(group.name)
    assert joined is not None
    received = torch.zeros(3)
    work = joined.process_group.broadcast(received, 0)
    dist.broadcast(torch.arange(3.0), src=0, group=hosted[0])
    work.wait()
    assert received.tolist() == [0, 1, 2]
    dist.destroy_process_group(hosted[0])
    assert joined.process_group.name() == "gloo"  # ours, which torch does not know, was not destroyed with it


def test_two_joins_at_a_time_are_one(trainer: Any, groups: Groups, new_group: NewGroup) -> None:
    group = new_group()
    failed: list[Exception] = []

    def join() -> None:
        try:
            groups.join(group, 0, 30)
        except Exception as error:
            failed.append(error)

    threads = [in_thread(join) for _ in range(3)]
    trainer.host(group)
    for thread in threads:
        thread.join(30)
    assert failed == []
    assert trainer.answer() == {}
    joined = groups.get(group.name)
    assert joined is not None
    assert joined.alive


def test_other_parameters_give_up_an_attempt_that_met_nobody(
    trainer: Any, groups: Groups, new_group: NewGroup, wait_until: WaitUntil
) -> None:
    failed: list[WeightSyncError] = []
    nobody, group = new_group(), new_group()

    def join() -> None:
        with pytest.raises(WeightSyncError) as error:
            groups.join(nobody, 0, 300)
        failed.append(error.value)

    def is_attempted() -> bool:
        return any(thread.name == "join-weight-group" for thread in threading.enumerate())

    waiting = in_thread(join)
    wait_until(is_attempted, what="an attempt that waits")
    joined = trainer.meet(groups, group)
    waiting.join(5)
    assert len(failed) == 1
    assert "was given up" in str(failed[0]) and f"127.0.0.1:{group.master_port}" in str(failed[0])
    wait_until(lambda: not is_attempted(), what="no attempt left")
    assert groups.get(group.name) is joined
    assert joined.alive


def test_groups_whose_trainer_has_gone_are_forgotten(
    new_trainer: Any, groups: Groups, new_group: NewGroup
) -> None:
    first, second = new_trainer(), new_trainer()
    gone = first.meet(groups, new_group("gone"))
    stays = second.meet(groups, new_group("stays"))
    assert groups.drop_dead() == []
    first.kill()
    assert groups.drop_dead() == ["gone"]
    assert gone.reason == "its trainer has gone"
    assert groups.get("gone") is None
    assert groups.get("stays") is stays


def test_a_group_in_use_is_left_to_its_receiver(trainer: Any, groups: Groups, new_group: NewGroup) -> None:
    group = new_group()
    joined, quiet = trainer.meet(groups, group), threading.Event()
    joined.used_by((), quiet)
    trainer.kill()
    assert groups.drop_dead() == []
    quiet.set()
    assert groups.drop_dead() == [group.name]


def test_joining_and_leaving_leaves_nothing_behind(
    trainer: Any, groups: Groups, new_group: NewGroup, num_threads: Callable[[], int], wait_until: WaitUntil
) -> None:
    def once() -> None:
        group = new_group()
        trainer.meet(groups, group)
        groups.leave(group.name)
        trainer.begin("destroy", name=group.name)
        trainer.answer()

    once()
    wait_until(lambda: num_threads() > 0)
    threads, files = num_threads(), len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        once()
    wait_until(lambda: num_threads() <= threads, what="as many threads as before")
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= files, what="as many files as before")


def test_buckets_are_announced_by_a_trainer_that_says_so(
    trainer: Any, groups: Groups, new_group: NewGroup
) -> None:
    group = new_group()
    silent = trainer.meet(groups, group)
    assert silent.is_announced(7)  # no word will come

    name = group.name
    sender = object.__new__(SendingGroup)
    sender.name, sender._num_buckets, sender._left = name, 0, False
    joined = JoinedGroup(group, 1, groups._device, silent._store, silent._link, None)
    sender._store = prefixed(silent._store, group)
    sender._store.set(ANNOUNCED_KEY, "0")
    assert not joined.is_announced(0)
    sender.announce()
    assert joined.is_announced(0) and not joined.is_announced(1)
    joined.num_buckets += 1  # a session of one bucket has ended
    assert not joined.is_announced(0)
    sender.announce()
    sender.announce()
    assert joined.is_announced(1) and joined.is_announced(0) and not joined.is_announced(2)
    trainer.kill()
    with pytest.raises(WeightSyncError, match="its store is closed"):
        joined.is_announced(2)
    sender._left = True
    with pytest.raises(RuntimeError, match="was left"):
        sender.announce()
