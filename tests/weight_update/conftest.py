"""Trainers as processes of their own, and fixtures to join their groups."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from segue.messages.weight_operations import Group
from segue.weight_update.transport.group import JoinedGroup
from segue.weight_update.transport.joining import Groups
from tests.support.child import start_child
from tests.support.ports import free_port

TRAINER = Path(__file__).with_name("trainer.py")
DEADLINE_S = 60.0


def join(groups: Groups, group: Group, tp_rank: int, timeout_s: float) -> None:
    """Join a group, and wait until that has succeeded; nothing happens if it was joined before."""
    groups.wait(groups.start(group, tp_rank, timeout_s), timeout_s)


class Trainer:
    """A process that hosts groups and broadcasts."""

    def __init__(self, address: str, deadline_s: float = DEADLINE_S) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(deadline_s)
        self._socket.connect(address)
        self._lines = self._socket.makefile("rw")
        self.pid: int = json.loads(self._lines.readline())["pid"]

    def begin(self, do: str, **order: Any) -> None:
        self._lines.write(json.dumps({"do": do, **order}) + "\n")
        self._lines.flush()

    def answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._lines.readline())
        return answer

    def do(self, do: str, **order: Any) -> None:
        self.begin(do, **order)
        answer = self.answer()
        assert "error" not in answer, answer

    def host(self, group: Group) -> None:
        self.begin("host", port=group.master_port, name=group.name, world_size=group.world_size)

    def make(self, buckets: list[Any], *, flattened: bool) -> None:
        self.begin("make", buckets=buckets, flattened=flattened)
        assert self.answer() == {}

    def send(self, group: Group, buckets: list[Any], *, flattened: bool, after: float = 0.0) -> None:
        self.make(buckets, flattened=flattened)
        self.begin("send", name=group.name, after=after)

    def meet(self, groups: Groups, group: Group) -> JoinedGroup:
        """Host the group while the rank joins it."""
        self.host(group)
        join(groups, group, 0, DEADLINE_S)
        assert self.answer() == {}
        joined = groups.get(group.name)
        assert joined is not None
        return joined

    def kill(self) -> None:
        """Kill the process, and return once it has ended and its ports are free."""
        os.kill(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + DEADLINE_S
        with suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.kill(self.pid, 0)
                time.sleep(0.001)
        self.close()

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


@pytest.fixture(scope="session")
def trainer_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The socket at which trainers can be started."""
    address = str(tmp_path_factory.mktemp("trainer") / "socket")
    process = start_child([sys.executable, str(TRAINER), address], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield address
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.fixture
def new_trainer(trainer_address: str) -> Iterator[Callable[[], Trainer]]:
    trainers: list[Trainer] = []

    def new() -> Trainer:
        trainers.append(Trainer(trainer_address))
        return trainers[-1]

    yield new
    for trainer in trainers:
        trainer.close()


@pytest.fixture
def trainer(new_trainer: Callable[[], Trainer]) -> Trainer:
    return new_trainer()


@pytest.fixture
def groups() -> Iterator[Groups]:
    found = Groups(torch.device("cpu"))
    yield found
    found.close()


@pytest.fixture
def new_group() -> Callable[..., Group]:
    """A group of one trainer and one rank, at a free port."""

    def new(name: str = "weights", **others: Any) -> Group:
        fields = {
            "name": name,
            "master_address": "127.0.0.1",
            "master_port": free_port(),
            "rank_offset": 1,
            "world_size": 2,
            "backend": "gloo",
        }
        return Group(**{**fields, **others})

    return new


@pytest.fixture
def num_threads() -> Callable[[], int]:
    """Counts the threads of this process, including those of C++."""
    return lambda: len(os.listdir("/proc/self/task"))


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
