"""A fleet of actors in a real Ray cluster of this machine, with Ray Serve in front: `programs/ray_fleet.py`.

Ray is in an environment of its own, because it is large; `make clients` installs it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import interpreter
from tests.conftest import WaitUntil
from tests.e2e.clustering import descendants
from tests.e2e.syncing import free_port, write_checkpoints
from tests.support.child import start_child
from tests.support.tiny_model import make_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROGRAM = Path(__file__).with_name("programs") / "ray_fleet.py"
MARK = "SEGUE_TEST_RAY_MARK"  # a variable that all processes of a cluster inherit
AGENTS = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}  # titles of Ray's processes, one of each per node


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = make_tokenizer()
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    (path,) = write_checkpoints(tmp_path_factory.mktemp("model"), kind="qwen3", count=1, vocab_size=size)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def environment(mark: str) -> dict[str, str]:
    own = {MARK: mark, "TEST_ROUTER_PORT": str(free_port()), "TEST_SERVE_PORT": str(free_port())}
    return {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", **own}


def marked(mark: str) -> dict[int, str]:
    """The command lines of the processes that have the mark."""
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (directory / "environ").read_bytes().split(b"\0"):
                found[int(directory.name)] = (directory / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def seen(model: Path, wait_until: WaitUntil) -> Iterator[Mapping[str, Any]]:
    """What the program has seen."""
    python, mark = interpreter("ray"), f"whole-{os.getpid()}"
    done = subprocess.run(
        [python, PROGRAM, model, "whole"],
        env=environment(mark),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    wait_until(lambda: not marked(mark), timeout=30, what="the end of all processes")
    yield json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("when", "steps"), [("weights", 1), ("again", 2)])
def test_an_update_of_the_trainer_reaches_all_engines(seen: Mapping[str, Any], when: str, steps: int) -> None:
    """Both engines were started again at other ports before; the second one follows the router's restart."""
    found = seen[when]
    assert found["step"] == steps
    assert found["sent"] == found["engines"] and len(found["engines"]) == 2
    assert found["after"][0] == found["after"][1] != found["before"]
    assert len(set(found["versions"])) == 1


@pytest.mark.parametrize("whom", ["engine", "actor"])
def test_service_goes_on_without_an_error_and_the_actor_comes_back(
    seen: Mapping[str, Any], whom: str
) -> None:
    """``engine``: the engine's own process is killed by SIGKILL; ``actor``: that of its actor."""
    found = seen[whom]
    assert found["errors"] == [] and found["replies"] >= 24
    assert found["restarted"] == [False, True] and found["other"]
    assert not found["left"]


def test_a_router_that_dies_comes_back_at_its_url_and_the_engines_with_it(seen: Mapping[str, Any]) -> None:
    found = seen["router"]
    assert found["same_url"] and found["restarted"] and len(found["tokens"]) == 12


def test_ray_serve_passes_requests_streams_and_errors_on(seen: Mapping[str, Any]) -> None:
    found = seen["serve"]
    assert found["stream"] and found["events"] > 20
    assert found["spread_s"] > 0.01, "the events came one by one"
    assert found["models"] == ["policy"] and found["texts"][0] == found["texts"][1]
    assert "400" in found["refused"] and "temperature" in found["refused"]
    assert found["after_leaving"], "the request ended when its client had left"


def test_nothing_is_left_when_the_fleet_ends(seen: Mapping[str, Any]) -> None:
    assert len(seen["pids"]) == 4 and seen["left"] == []


def test_nothing_is_left_when_the_program_is_killed(model: Path, wait_until: WaitUntil) -> None:
    """Ray's agents are left out: for 60 s they try to report the raylet's death to a server that died, too.

    The agents write their titles over some or all of their environment, so only their command lines tell for
    sure which processes they are. All other processes end within a few seconds: workers look every second
    whether the raylet lives.
    """
    python, mark = interpreter("ray"), f"left-{os.getpid()}"
    process = start_child(
        [python, PROGRAM, model, "left"],
        env=environment(mark),
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    agents: set[int] = set()
    try:
        line = process.stdout.readline()
        assert line and "url" in json.loads(line)
        agents = {pid for pid, words in descendants(process.pid).items() if words[0] in AGENTS}
        assert len(agents) == 2
        assert sum("segue" in command for command in marked(mark).values()) >= 3
        process.kill()
        wait_until(lambda: marked(mark).keys() <= agents, timeout=30, what="the end of all processes")
    finally:
        with process:  # waits, and closes the pipe, which a process that is left may hold open
            process.kill()
        for pid in agents:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
