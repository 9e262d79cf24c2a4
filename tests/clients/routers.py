"""Other projects' routers, as processes before engines of Segue."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.environments import interpreter
from tests.support.child import start_child
from tests.support.ports import free_port

START_S = 60.0


def _token_loads(reply: Any) -> dict[str, int]:
    """The tokens on each engine, by SGLang's `/get_load`; -1 is unknown."""
    return {worker["worker"]: worker["load"] for worker in reply["workers"]}


def _request_loads(reply: Any) -> dict[str, int]:
    """The running requests on each engine."""
    return {load["worker"]: load["num_running_reqs"] for load in reply["loads"]}


@dataclass(frozen=True, slots=True)
class RouterProgram:
    """One router: its environment, how it is started, and which routes it has."""

    environment: str
    module: str
    flags: tuple[str, ...]
    loads: Callable[[Any], Mapping[str, int]] | None  # reads its `/get_loads`; None: it has none of Segue's
    tokens: bool  # whether it passes token ids on: `/inference/v1/generate`, and prompts of `/v1/completions`
    native_seeds: bool = True  # whether it passes `sampling_seed` of `/generate` on, and does not drop it


# The engines take turns. What fails at an engine is tried again at another one, and an engine where two
# requests have failed, or a probe, gets no more until a probe, which comes every second, succeeds.
FLAGS = (
    *("--policy", "round_robin"),
    *("--cb-failure-threshold", "2", "--cb-success-threshold", "1", "--cb-timeout-duration-secs", "1"),
    *("--health-failure-threshold", "1", "--health-success-threshold", "1"),
    *("--health-check-interval-secs", "1", "--health-check-timeout-secs", "5"),
)
SGLANG_ROUTER = RouterProgram(
    environment="sglang-router",
    module="sglang_router.launch_router",
    flags=FLAGS,
    loads=_token_loads,
    tokens=False,
)
# It reads the loads of an older SGLang, and so has none of Segue's, as it has none of vLLM's. Of `/generate`
# it drops what it does not know.
VLLM_ROUTER = RouterProgram(
    environment="vllm-router",
    module="vllm_router.launch_router",
    flags=FLAGS,
    loads=None,
    tokens=True,
    native_seeds=False,
)
# It takes Segue for vLLM, as `/version` answers. Without the last flag it leaves out an engine with eight
# waiting requests, whatever the policy.
SMG = RouterProgram(
    environment="smg",
    module="smg.launch_router",
    flags=(*FLAGS, "--disable-worker-overload-protection"),
    loads=_request_loads,
    tokens=False,
)
ROUTERS = (SGLANG_ROUTER, VLLM_ROUTER, SMG)


@contextmanager
def running(program: RouterProgram, engines: Sequence[str], log: Path) -> Iterator[str]:
    """Runs a router before engines for the block, and yields its address. Its log goes to a file."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [str(interpreter(program.environment)), "-m", program.module, "--worker-urls", *engines]
    command += ["--host", "127.0.0.1", "--port", str(port), *program.flags]
    # Else vllm-router and smg show their metrics on port 29000 of every address.
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    with log.open("w") as file, start_child(command, stdout=file, stderr=subprocess.STDOUT) as process:
        try:
            until_healthy(url, len(engines), process)
            yield url
        finally:
            process.kill()


def until_healthy(url: str, num_engines: int, process: subprocess.Popen[Any] | None = None) -> None:
    """Waits until the router counts so many engines as healthy."""
    deadline, found = time.monotonic() + START_S, "no answer"
    while True:
        try:
            reply = httpx.get(f"{url}/readiness", timeout=5)
            found = reply.text
            if reply.status_code == 200 and reply.json()["healthy_workers"] == num_engines:
                return
        except httpx.HTTPError:
            if process is not None and process.poll() is not None:
                pytest.fail(f"the router ended with exit code {process.returncode}")
        assert time.monotonic() < deadline, f"{url} did not have {num_engines} healthy engines: {found}"
        time.sleep(0.05)
