"""Runs children for tests, and says what is left of them."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from segue.cluster.probe import ReadinessProbe
from segue.cluster.processes import ChildSpec
from segue.cluster.runner import ChildRunner
from segue.cluster.supervisor import SupervisorRules
from segue.listener import bind

STAND_IN = Path(__file__).with_name("stand_in.py")


def stand_in(name: str, port: int, *ways: str, stage: int = 0) -> ChildSpec:
    return ChildSpec(
        name=name,
        role="worker",
        stage=stage,
        command=(sys.executable, "-S", "-E", str(STAND_IN), str(port), *ways),
        environment=dict(os.environ),
        probe=ReadinessProbe(url=f"http://127.0.0.1:{port}/ready"),
    )


def free_port() -> socket.socket:
    """A socket that keeps a port, at which a child can listen."""
    return bind("127.0.0.1", 0)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@dataclass
class Running:
    """A runner at work, and what its children wrote."""

    runner: ChildRunner
    done: asyncio.Task[None]
    lines: list[tuple[str, str]]
    ready: list[str] = field(default_factory=list)

    def pids(self, name: str, word: str = "pid") -> list[int]:
        """The process ids that a child has written, of itself or of its ``fork``."""
        return [int(line.split()[1]) for who, line in self.lines if who == name and line.startswith(word)]

    async def until(self, is_so: Callable[[], object], what: str = "the condition") -> None:
        deadline = time.monotonic() + 60
        while not is_so():
            assert time.monotonic() < deadline, f"{what} did not hold: {self.lines}"
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(*specs: ChildSpec, drain_s: float = 10.0, stop_s: float = 5.0) -> AsyncIterator[Running]:
    """Runs children until the block ends, and checks that none is left then."""
    lines: list[tuple[str, str]] = []
    ready: list[str] = []
    rules = SupervisorRules(drain_s=drain_s, stop_s=stop_s)
    runner = ChildRunner(specs, rules, lambda name, line: lines.append((name, line)), ready.append)
    found = Running(runner, asyncio.create_task(runner.run()), lines, ready)
    try:
        yield found
    finally:
        if not found.done.done():
            runner.stop()
        await asyncio.wait_for(found.done, 60)
        for spec in specs:
            assert not any(map(is_alive, found.pids(spec.name)))
