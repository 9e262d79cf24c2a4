"""Fixtures: two fake engines with faults that a test chooses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.support.child import start_child


@dataclass(frozen=True)
class FakeEngine:
    process: subprocess.Popen[str]
    url: str

    def fault(self, **faults: str) -> None:
        httpx.post(f"{self.url}/fault", json=faults)

    def seen(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.url}/seen").json()
        return found


def start() -> FakeEngine:
    command = [sys.executable, "-m", "tests.trainer.fake_engine"]
    process = start_child(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return FakeEngine(process, process.stdout.readline().strip())


def end(engine: FakeEngine) -> None:
    engine.process.kill()
    engine.process.wait(60)
    assert engine.process.stdout is not None
    engine.process.stdout.close()


@pytest.fixture(scope="session")
def running() -> Iterator[list[FakeEngine]]:
    engines = [start(), start()]
    yield engines
    for engine in engines:
        end(engine)


@pytest.fixture
def engines(running: list[FakeEngine]) -> Iterator[list[FakeEngine]]:
    yield running
    for engine in running:
        engine.fault()


@pytest.fixture
def mortal() -> Iterator[Callable[[], FakeEngine]]:
    """Engines that a test may kill."""
    started: list[FakeEngine] = []

    def make() -> FakeEngine:
        started.append(start())
        return started[-1]

    yield make
    for engine in started:
        end(engine)
