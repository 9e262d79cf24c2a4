"""Weight updates over NCCL: a trainer process that uses only torch on one GPU, a receiver on another."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from segue.messages.weight_operations import Group
from segue.weight_update.transport.group import JoinedGroup
from segue.weight_update.transport.joining import Groups
from tests.gpu.ranks import ENVIRONMENT
from tests.weight_update.conftest import join as wait_joined
from tests.weight_update.conftest import new_group as new_group
from tests.weight_update.conftest import new_trainer as new_trainer
from tests.weight_update.conftest import trainer_address as trainer_address
from tests.weight_update.transport.test_receiver import BUCKETS, NewGroup, Observer, Tensors, assert_received

pytestmark = [pytest.mark.gpu, pytest.mark.alone]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
LARGE: list[Tensors] = [[(f"w{i}", "float32", [64 << 20])] for i in range(8)]  # 256 MiB each


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def groups() -> Iterator[Groups]:
    found = Groups(torch.device("cuda", torch.cuda.device_count() - 1))
    yield found
    found.close()


class Kept:
    """A sink that keeps copies, in memory allocated before; tensors in `direct` are received into it."""

    def __init__(self, buckets: list[Tensors], device: torch.device, direct: set[str]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._direct = direct
        self._places = {
            name: torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
            for bucket in buckets
            for name, dtype, shape in bucket
        }

    def direct(self, name: str) -> Tensor | None:
        return self._places[name] if name in self._direct else None

    def store(self, name: str, tensor: Tensor) -> None:
        place = self._places[name]
        if tensor.data_ptr() != place.data_ptr():
            place.copy_(tensor)
        self.tensors[name] = place

    def prepare(self, tensors: Sequence[tuple[str, Tensor]]) -> Callable[[], None]:
        def take() -> None:
            for name, tensor in tensors:
                self.store(name, tensor)

        return take


def join(trainer: Any, groups: Groups, group: Group, *, eager: bool, device: int = 0) -> JoinedGroup:
    """Join while the trainer hosts; an eager trainer answers only once the first receive is posted."""
    trainer.begin(
        "host",
        port=group.master_port,
        name=group.name,
        world_size=group.world_size,
        backend="nccl",
        device=device if eager else None,
    )
    wait_joined(groups, group, 0, 60)
    joined = groups.get(group.name)
    assert joined is not None
    if not eager:
        assert trainer.answer() == {}
    return joined


def open_session(joined: JoinedGroup, buckets: list[Tensors], direct: set[str], flattened: bool) -> Observer:
    session = Observer(joined, buckets, Kept(buckets, joined.device, direct), flattened=flattened)
    assert session.ready.wait(30)
    return session


def make(trainer: Any, buckets: list[Tensors], *, flattened: bool, device: int = 0) -> None:
    trainer.begin("make", buckets=buckets, flattened=flattened, device=f"cuda:{device}")
    assert trainer.answer() == {}


@two_gpus
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("flattened", [False, True])
def test_all_tensors_arrive(
    new_trainer: Any, groups: Groups, new_group: NewGroup, flattened: bool, eager: bool
) -> None:
    group, trainer = new_group(backend="nccl"), new_trainer()
    joined = join(trainer, groups, group, eager=eager)
    for number in range(3):
        session = open_session(joined, BUCKETS, {"embed", "scale", "nothing"}, flattened)
        if eager and number == 0:
            assert trainer.answer() == {}
        make(trainer, BUCKETS, flattened=flattened)
        trainer.begin("send", name=group.name)
        assert session.end() is None
        assert "error" not in trainer.answer()
        found = {name: tensor.cpu() for name, tensor in session.sink.tensors.items()}
        assert_received(found, BUCKETS)
    assert joined.alive


@two_gpus
def test_nothing_is_allocated_while_a_receive_is_posted(
    new_trainer: Any, groups: Groups, new_group: NewGroup
) -> None:
    group, trainer = new_group(backend="nccl"), new_trainer()
    joined = join(trainer, groups, group, eager=False)
    make(trainer, LARGE, flattened=True)
    counts = []
    for _ in range(2):
        session = open_session(joined, LARGE, set(), True)
        before = torch.cuda.memory_stats(joined.device)
        trainer.begin("send", name=group.name)
        assert session.end() is None
        after = torch.cuda.memory_stats(joined.device)
        trainer.answer()
        assert after["allocation.all.allocated"] == before["allocation.all.allocated"]
        counts.append(after["num_device_alloc"])
        del session
        gc.collect()  # the session and its callbacks refer to each other
    assert counts[0] == counts[1]  # the second session reuses the memory of the first one's receive buffers


@two_gpus
@pytest.mark.parametrize("flattened", [False, True])
def test_a_killed_trainer_ends_the_session_and_another_one_is_joined(
    new_trainer: Any, groups: Groups, new_group: NewGroup, flattened: bool
) -> None:
    group, first = new_group(backend="nccl"), new_trainer()
    joined = join(first, groups, group, eager=False)
    make(first, LARGE[:2], flattened=flattened)
    session = open_session(joined, LARGE, set(), flattened)
    first.begin("send", name=group.name)
    assert "error" not in first.answer()  # two of eight buckets are sent: the receive waits for the third
    killed = time.monotonic()
    first.kill()
    error = session.end(10)
    assert error is not None
    assert error.startswith("the connection to the trainer was lost")
    assert time.monotonic() - killed < 5
    x = torch.ones(1024, 1024, device=joined.device)
    assert (x @ x)[0, 0].item() == 1024  # the device is free of the aborted kernel

    second = new_trainer()
    joined = join(second, groups, group, eager=False)
    session = open_session(joined, BUCKETS, set(), flattened)
    make(second, BUCKETS, flattened=flattened)
    second.begin("send", name=group.name)
    assert session.end() is None
    assert_received({name: tensor.cpu() for name, tensor in session.sink.tensors.items()}, BUCKETS)


@two_gpus
def test_a_session_with_a_posted_receive_is_cancelled(
    new_trainer: Any, groups: Groups, new_group: NewGroup
) -> None:
    group, trainer = new_group(backend="nccl"), new_trainer()
    joined = join(trainer, groups, group, eager=True)
    session = open_session(joined, BUCKETS, set(), True)
    assert trainer.answer() == {}  # the communicator is built, so a kernel is running that must be aborted
    began = time.monotonic()
    session.receiver.end("no longer wanted")
    assert time.monotonic() - began < 0.5
    assert session.end(10) == "no longer wanted"
    assert not joined.alive


def test_a_trainer_on_the_same_gpu_is_an_error_with_a_remedy(
    new_trainer: Any, groups: Groups, new_group: NewGroup
) -> None:
    group, trainer = new_group(backend="nccl"), new_trainer()
    joined = join(trainer, groups, group, eager=False)
    index = joined.device.index
    session = open_session(joined, BUCKETS, set(), True)
    make(trainer, BUCKETS, flattened=True, device=index)
    trainer.begin("send", name=group.name)
    error = session.end(30)
    assert error is not None
    assert "update_weights_from_tensor" in error
    assert f"cuda:{index}" in error
