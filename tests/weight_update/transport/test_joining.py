import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec import structs

from segue.errors import WeightSyncError
from segue.messages.weight_operations import Group
from segue.trainer.group import TrainerGroup as SendingGroup
from segue.weight_update.transport import rendezvous
from segue.weight_update.transport.group import ANNOUNCED_KEY, JoinedGroup, prefixed
from segue.weight_update.transport.joining import MAX_ATTEMPTS, Groups
from segue.weight_update.transport.rendezvous import resolve
from tests.conftest import WaitUntil
from tests.weight_update.conftest import in_thread, join
from tests.weight_update.trainer import host

LATE_S = 10.0  # a join that ignored its deadline would take as long as the library's, which is minutes

NewGroup = Callable[..., Group]


def test_a_group_is_joined(trainer: Any, groups: Groups, new_group: NewGroup) -> None:
    joined = trainer.meet(groups, new_group())
    assert joined.alive
    assert joined.device.type == "cpu"
    assert (joined.process_group.rank(), joined.process_group.size()) == (1, 2)


def test_joining_again_with_the_same_parameters_keeps_the_group(
    trainer: Any, groups: Groups, new_group: NewGroup
) -> None:
    group = new_group()
    joined = trainer.meet(groups, group)
    join(groups, group, 0, 5)
    assert groups.get(group.name) is joined


def test_other_parameters_for_a_live_group_are_refused(
    trainer: Any, groups: Groups, new_group: NewGroup
) -> None:
    trainer.meet(groups, new_group())
    with pytest.raises(WeightSyncError, match=r"joined already, with other parameters .* destroy it first"):
        join(groups, new_group(), 0, 5)


def test_nccl_on_a_cpu_is_refused_at_once(groups: Groups, new_group: NewGroup) -> None:
    with pytest.raises(WeightSyncError, match="needs an engine on CUDA"):
        join(groups, new_group(backend="nccl"), 0, 30)


def test_a_join_without_a_trainer_ends_at_the_deadline(groups: Groups, new_group: NewGroup) -> None:
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"not joined within 0\.5 s"):
        join(groups, new_group(), 0, 0.5)
    assert time.monotonic() - began < LATE_S


def test_a_join_is_retried_after_a_failure(trainer: Any, groups: Groups, new_group: NewGroup) -> None:
    group = new_group()
    with pytest.raises(WeightSyncError):
        join(groups, group, 0, 0.2)
    assert trainer.meet(groups, group).alive


def test_a_join_ends_at_the_deadline_while_other_ranks_are_missing(
    trainer: Any, groups: Groups, new_group: NewGroup, num_threads: Callable[[], int], wait_until: WaitUntil
) -> None:
    group = new_group(world_size=3)
    before = num_threads()
    trainer.host(group)
    with pytest.raises(WeightSyncError, match="was not joined within 1 s"):
        join(groups, group, 0, 1.0)
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
    join(groups, group, 0, 30)
    hosting.join(60)
    joined = groups.get(group.name)
    assert joined is not None
    received = torch.zeros(3)
    work = joined.process_group.broadcast(received, 0)
    dist.broadcast(torch.arange(3.0), src=0, group=hosted[0])
    work.wait()
    assert received.tolist() == [0, 1, 2]
    dist.destroy_process_group(hosted[0])
    assert joined.process_group.name() == "gloo"  # not destroyed: torch does not know this one


def test_concurrent_joins_share_one_attempt(trainer: Any, groups: Groups, new_group: NewGroup) -> None:
    group = new_group()
    failed: list[Exception] = []

    def try_to_join() -> None:
        try:
            join(groups, group, 0, 30)
        except Exception as error:
            failed.append(error)

    threads = [in_thread(try_to_join) for _ in range(3)]
    trainer.host(group)
    for thread in threads:
        thread.join(60)
    assert failed == []
    assert trainer.answer() == {}
    joined = groups.get(group.name)
    assert joined is not None
    assert joined.alive


def test_other_parameters_give_up_an_attempt_that_found_no_trainer(
    trainer: Any, groups: Groups, new_group: NewGroup, wait_until: WaitUntil
) -> None:
    failed: list[WeightSyncError] = []
    unhosted, group = new_group(), new_group()

    def fail_to_join() -> None:
        with pytest.raises(WeightSyncError) as error:
            join(groups, unhosted, 0, 300)
        failed.append(error.value)

    def is_attempted() -> bool:
        return any(thread.name == "join-weight-group" for thread in threading.enumerate())

    waiting = in_thread(fail_to_join)
    wait_until(is_attempted, what="an attempt that waits")
    joined = trainer.meet(groups, group)
    waiting.join(60)
    assert len(failed) == 1
    assert "was given up" in str(failed[0]) and f"127.0.0.1:{group.master_port}" in str(failed[0])
    wait_until(lambda: not is_attempted(), what="no attempt left")
    assert groups.get(group.name) is joined
    assert joined.alive


def test_groups_whose_trainer_has_gone_are_dropped(
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


def test_a_group_that_a_receiver_uses_is_not_dropped(
    trainer: Any, groups: Groups, new_group: NewGroup
) -> None:
    group = new_group()
    joined, idle = trainer.meet(groups, group), threading.Event()
    joined.set_receiver((), idle)
    trainer.kill()
    assert groups.drop_dead() == []
    idle.set()
    assert groups.drop_dead() == [group.name]


def test_joining_and_leaving_leaks_no_threads_and_no_files(
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
    for _ in range(8):
        once()
    wait_until(lambda: num_threads() <= threads, what="as many threads as before")
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= files, what="as many files as before")


def test_announced_buckets_are_those_that_the_trainer_has_begun(
    trainer: Any, groups: Groups, new_group: NewGroup
) -> None:
    group = new_group()
    silent = trainer.meet(groups, group)
    assert silent.is_announced(7)  # it announces no buckets

    joined = JoinedGroup(group, 1, groups._device, silent._store, silent._link, None)
    sender = object.__new__(SendingGroup)
    sender.group, sender._num_buckets, sender._joined = group, 0, joined
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
    sender._joined = None
    with pytest.raises(RuntimeError, match="was left"):
        sender.announce()


@pytest.fixture
def short_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets torch try for 0.3 s at a time to reach a store, where the peer is none and no try can succeed."""
    monkeypatch.setattr(rendezvous, "_STORE_S", 0.3)


@pytest.fixture
def silent(short_tries: None) -> Iterator[int]:
    """The port of a listener that accepts connections and never sends anything."""
    with socket.create_server(("127.0.0.1", 0), backlog=500) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def closing_listener(short_tries: None) -> Iterator[int]:
    """The port of a listener that closes every connection at once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def close_all() -> None:
            with suppress(OSError):
                while True:
                    listener.accept()[0].close()

        closing = in_thread(close_all)
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        closing.join(60)


@pytest.mark.parametrize("listener", ["silent", "closing_listener"])
def test_a_join_at_a_listener_that_is_no_store_ends_at_the_deadline(
    listener: str,
    request: pytest.FixtureRequest,
    groups: Groups,
    new_group: NewGroup,
    num_threads: Callable[[], int],
    wait_until: WaitUntil,
) -> None:
    group, before = new_group(master_port=request.getfixturevalue(listener)), num_threads()
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match="was not joined within 1 s"):
        join(groups, group, 0, 1.0)
    assert time.monotonic() - began < LATE_S
    wait_until(lambda: num_threads() <= before, what="no thread of the attempt left")


@pytest.mark.parametrize("case", ["no listener", "silent", "others missing"])
def test_a_stopped_attempt_ends_before_its_deadline(
    case: str,
    silent: int,
    trainer: Any,
    groups: Groups,
    new_group: NewGroup,
    num_threads: Callable[[], int],
    wait_until: WaitUntil,
) -> None:
    before = num_threads()
    group = new_group(world_size=3, **({"master_port": silent} if case == "silent" else {}))
    if case == "others missing":
        trainer.host(group)
    attempt = groups.start(group, 0, 3600)
    if case != "no listener":
        wait_until(lambda: attempt.peer is not None, what="an accepted connection")
    groups.stop(structs.replace(group, rank_offset=2), "it is another")
    assert not attempt.ended.is_set()
    groups.stop(group, "its client has gone")
    with pytest.raises(WeightSyncError, match="was given up: its client has gone"):
        groups.wait(attempt, 0)
    wait_until(lambda: num_threads() <= before, what="no thread of the attempt left")


def test_the_number_of_attempts_is_limited(
    silent: int,
    groups: Groups,
    new_group: NewGroup,
    num_threads: Callable[[], int],
    wait_until: WaitUntil,
) -> None:
    before = num_threads()
    refusals = []
    for index in range(400):
        group = new_group(f"g{index % 100}", master_port=silent, world_size=2 + index // 100)
        attempt = groups.start(group, 0, 2.0)
        if attempt.error is not None:
            refusals.append(attempt.error)
    assert len(refusals) >= 400 - MAX_ATTEMPTS
    assert f"127.0.0.1:{silent}" in refusals[0] and len(refusals[0]) < 2000
    assert num_threads() - before <= MAX_ATTEMPTS + 2
    groups.close()
    wait_until(lambda: num_threads() <= before, what="no thread left")


def test_giving_up_an_attempt_leaves_other_groups_of_the_same_store_alone(
    trainer: Any, groups: Groups, new_group: NewGroup, wait_until: WaitUntil
) -> None:
    group = new_group()
    joined = trainer.meet(groups, group)
    attempt = groups.start(structs.replace(group, name="other"), 0, 1.0)
    wait_until(lambda: attempt.peer is not None, what="an accepted connection")
    groups.stop(attempt.group, "its client has gone")
    wait_until(lambda: not groups._running, what="no attempt left")
    assert joined.alive
    received = torch.zeros(4, dtype=torch.uint8)
    work = joined.process_group.broadcast(received, 0)
    trainer.send(group, [[["a", "uint8", [4]]]], flattened=False)
    work.wait()
    assert trainer.answer().keys() == {"seconds"}


@pytest.mark.parametrize(
    ("allowed", "is_allowed"),
    [
        ((), True), (("localhost",), True), (("127.0.0.1",), True), (("127.0.0.0/8",), True),
        (("::1", "127.0.0.1/32"), True),
        (("10.0.0.0/8",), False), (("10.0.0.1", "nowhere.invalid"), False), (("127.0.0.2",), False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["127.0.0.1", "::ffff:127.0.0.1"])
def test_addresses_may_be_limited(
    allowed: tuple[str, ...], is_allowed: bool, name: str, new_group: NewGroup
) -> None:
    group = new_group(master_address=name)
    if is_allowed:
        assert resolve(group, allowed) == [(name, group.master_port)]
    else:
        with pytest.raises(WeightSyncError, match="is not allowed"):
            resolve(group, allowed)


def test_a_name_is_resolved_once_and_the_checked_address_is_used(
    trainer: Any, new_group: NewGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name server that gives another address the second time cannot redirect the join."""
    group, asked = new_group(master_address="trainer.example"), []

    def getaddrinfo(host: str, port: int, *args: Any, **options: Any) -> Any:
        if host == "trainer.example":
            asked.append(host)
            host = "127.0.0.1" if len(asked) == 1 else "127.0.0.2"
        return original(host, port, *args, **options)

    original = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    groups = Groups(torch.device("cpu"), ("127.0.0.1",))
    try:
        assert trainer.meet(groups, group).alive
        assert asked == ["trainer.example"]
        with pytest.raises(WeightSyncError, match=r"'trainer\.example' is not allowed"):
            join(groups, new_group("other", master_address="trainer.example"), 0, 5)
    finally:
        groups.close()


def test_the_retry_delay_of_an_address_grows_with_its_failures(groups: Groups, new_group: NewGroup) -> None:
    group, pauses = new_group(), []
    for _ in range(12):
        groups._record_result(group, failed=True)
        pauses.append(round(groups._retry_delay_s(group, time.monotonic()), 1))
    assert pauses[:3] == [0.1, 0.2, 0.4] and pauses[-1] == 5.0
    assert groups._retry_delay_s(new_group(), time.monotonic()) == 0.0
    attempt = groups.start(group, 0, 60)
    assert attempt.not_before - time.monotonic() > 3
    groups.stop(group, "it was enough")
    assert attempt.ended.wait(0)
    groups._record_result(group, failed=False)
    assert groups._retry_delay_s(group, time.monotonic()) == 0.0
    for index in range(1000):
        groups._record_result(new_group(master_address=f"a{index}", master_port=1), failed=True)
    assert len(groups._failures) <= 64
