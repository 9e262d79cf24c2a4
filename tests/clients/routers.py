"""Other projects' routers, as processes before engines of Segue."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.clients.environments import interpreter
from tests.e2e.syncing import free_port
from tests.support.child import start_child

START_S = 60.0
# Each request goes to the next engine, an engine that is gone counts as such after one failed probe, and probes are often.
PROBES = ("--health-failure-threshold", "1", "--health-success-threshold", "1", "--health-check-interval-secs", "1")


@dataclass(frozen=True, slots=True)
class RouterProgram:
    """One router: its environment, how it is started, and which routes it has."""

    environment: str
    start: tuple[str, ...]  # behind the interpreter
    flags: tuple[str, ...]
    loads: str  # its route that tells the load of each engine
    native: bool  # whether it has `/generate`
    tokens: bool  # whether it has `/inference/v1/generate`


SGLANG_ROUTER = RouterProgram(
    environment="sglang-router",
    start=("-m", "sglang_router.launch_router"),
    flags=("--policy", "round_robin", *PROBES),
    loads="/get_loads",
    native=True,
    tokens=False,
)
VLLM_ROUTER = RouterProgram(
    environment="vllm-router",
    start=("-m", "vllm_router.launch_router"),
    flags=("--policy", "round_robin", *PROBES),
    loads="/get_loads",
    native=True,
    tokens=True,
)
SMG = RouterProgram(
    environment="smg",
    start=("-m", "smg", "launch"),
    flags=("--policy", "round_robin", *PROBES),
    loads="/get_loads",
    native=True,
    tokens=False,
)
ROUTERS = (SGLANG_ROUTER, VLLM_ROUTER, SMG)


@contextmanager
def running(program: RouterProgram, engines: Sequence[str], log: Path) -> Iterator[str]:
    """Runs a router before engines for the block, and yields its address. Its log goes to a file."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(interpreter(program.environment)), *program.start, "--worker-urls", *engines]
    command += ["--host", "127.0.0.1", "--port", str(port), *program.flags]
    with log.open("w") as file, start_child(command, stdout=file, stderr=subprocess.STDOUT) as process:
        try:
            _wait_until_ready(url, len(engines), process, log)
            yield url
        finally:
            process.kill()


def _wait_until_ready(url: str, num_engines: int, process: subprocess.Popen[str], log: Path) -> None:
    """Waits until the router sends requests to all of its engines."""
    raise NotImplementedError
