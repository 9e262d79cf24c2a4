"""Real processes under a supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from segue.cluster.processes import HealthProbes, _children
from segue.cluster.runner import ChildRunner
from segue.cluster.supervisor import SupervisorRules
from segue.failover.pod import Execution, HttpGet, Probe, ProbeKind
from tests.cluster.running import free_port, is_alive, running, stand_in


@pytest.fixture
def ports() -> Iterator[list[int]]:
    kept = [free_port() for _ in range(3)]
    yield [each.getsockname()[1] for each in kept]
    for each in kept:
        each.close()


def test_children_become_ready_and_end_when_they_are_drained(ports: list[int]) -> None:
    async def test() -> None:
        specs = [stand_in("a", ports[0], "slow"), stand_in("door", ports[1], stage=1)]
        async with running(*specs) as found:
            await found.until(lambda: found.runner.supervisor.is_ready, "all are ready")
            assert sorted(found.ready) == ["a", "door"]
            found.runner.drain()
            await asyncio.wait_for(found.done, 60)
            assert ("a", "ended slowly") in found.lines

    asyncio.run(test())


def test_a_child_that_is_killed_comes_back_at_its_port(ports: list[int]) -> None:
    async def test() -> None:
        async with running(stand_in("a", ports[0]), stand_in("b", ports[1])) as found:
            await found.until(lambda: found.runner.supervisor.is_ready, "all are ready")
            (first,) = found.pids("a")
            os.kill(first, signal.SIGKILL)
            await found.until(lambda: found.ready.count("a") == 2, "it is ready again")
            second = found.pids("a")[1]
            assert second != first and is_alive(second) and found.runner.supervisor.is_ready
            assert len(found.pids("b")) == 1

    asyncio.run(test())


def health(**probes: Probe) -> HealthProbes:
    return HealthProbes(probes={ProbeKind[name.upper()]: probe for name, probe in probes.items()}, ports={})


def test_a_child_that_fails_its_liveness_probe_is_killed_and_started_again(
    ports: list[int], tmp_path: Path
) -> None:
    async def test() -> None:
        startup = Probe(action=HttpGet(path="/startup", port=ports[0]), period_s=0.02, failure_threshold=9999)
        liveness = Probe(action=HttpGet(path="/live", port=ports[0]), period_s=0.02, timeout_s=20)
        sick = replace(
            stand_in("a", ports[0], f"sick={tmp_path / 'sick'}", "deaf"),
            health=health(startup=startup, liveness=liveness),
        )
        async with running(sick, stand_in("b", ports[1]), stop_s=0.2) as found:
            await found.until(lambda: found.runner.supervisor.is_ready, "all are ready")
            (first,) = found.pids("a")
            (tmp_path / "sick").touch()
            await found.until(lambda: not is_alive(first), "it is killed")
            (tmp_path / "sick").unlink()
            await found.until(lambda: found.ready.count("a") == 2, "it is ready again")
            assert len(found.pids("b")) == 1

    asyncio.run(test())


def test_a_command_can_be_a_probe(ports: list[int], tmp_path: Path) -> None:
    async def test() -> None:
        command = (sys.executable, "-S", "-E", "-c", f"open({str(tmp_path / 'well')!r})")
        liveness = Probe(action=Execution(command=command), period_s=0.02, timeout_s=20, failure_threshold=2)
        (tmp_path / "well").touch()
        async with running(replace(stand_in("a", ports[0]), health=health(liveness=liveness))) as found:
            await found.until(lambda: found.runner.supervisor.is_ready, "it is ready")
            (first,) = found.pids("a")
            (tmp_path / "well").unlink()
            await found.until(lambda: not is_alive(first), "it is killed")
            (tmp_path / "well").touch()
            await found.until(lambda: found.ready.count("a") == 2, "it is ready again")

    asyncio.run(test())


def test_a_stop_kills_a_child_that_does_not_listen(ports: list[int]) -> None:
    async def test() -> None:
        async with running(stand_in("a", ports[0], "deaf"), stop_s=0.2) as found:
            await found.until(lambda: found.runner.supervisor.is_ready, "it is ready")
            began = time.monotonic()
            found.runner.stop()
            await asyncio.wait_for(found.done, 60)
            assert 0.2 <= time.monotonic() - began < 5

    asyncio.run(test())


def test_a_drain_does_not_last_longer_than_its_time(ports: list[int]) -> None:
    async def test() -> None:
        async with running(stand_in("a", ports[0], "deaf"), drain_s=0.2, stop_s=0.2) as found:
            await found.until(lambda: found.runner.supervisor.is_ready, "it is ready")
            found.runner.drain()
            await asyncio.wait_for(found.done, 60)

    asyncio.run(test())


def test_a_signal_reaches_a_child_that_is_only_being_started(ports: list[int]) -> None:
    async def test() -> None:
        async with running(stand_in("a", ports[0]), stop_s=60.0) as found:
            await asyncio.sleep(0)  # the runner has begun to start it
            found.runner.stop()
            await asyncio.wait_for(found.done, 30)  # half of the time until it would be killed

    asyncio.run(test())


def test_a_child_that_cannot_start_ends_the_others(ports: list[int]) -> None:
    async def test() -> None:
        async with running(stand_in("a", ports[0], "exit"), stand_in("b", ports[1])) as found:
            await asyncio.wait_for(found.done, 60)
            failure = found.runner.supervisor.failure
            assert failure == "a ended with exit code 3 before it was ready; see its log above"

    asyncio.run(test())


def test_a_child_whose_start_fails_in_an_unknown_way_leaves_no_other(ports: list[int]) -> None:
    async def test() -> None:
        wrong = replace(stand_in("b", ports[1]), command=("a\0b",))
        lines: list[str] = []
        specs, rules = [stand_in("a", ports[0]), wrong], SupervisorRules(drain_s=10, stop_s=5)
        runner = ChildRunner(specs, rules, lambda _, line: lines.append(line), lambda _: None)
        files, children = set(os.listdir("/proc/self/fd")), _children()
        with pytest.raises(ExceptionGroup) as raised:
            await runner.run()
        assert raised.group_contains(ValueError, match="null byte")
        assert set(os.listdir("/proc/self/fd")) <= files and _children() <= children

    asyncio.run(test())


def test_a_command_that_does_not_exist_is_a_failure_too(ports: list[int]) -> None:
    async def test() -> None:
        spec = replace(stand_in("a", ports[0]), command=("/no/such/program",))
        async with running(spec) as found:
            await asyncio.wait_for(found.done, 60)
            failure = found.runner.supervisor.failure or ""
            assert "because it could not be started (No such file or directory)" in failure

    asyncio.run(test())


def test_what_a_dead_child_has_left_ends_before_it_is_started_again(ports: list[int]) -> None:
    async def test() -> None:
        ways = ("fork", "stubborn-fork")
        async with running(stand_in("a", ports[0], *ways)) as found:
            await found.until(lambda: found.runner.supervisor.is_ready, "it is ready")
            forks = found.pids("a", "fork")
            os.kill(found.pids("a")[0], signal.SIGKILL)
            await found.until(lambda: len(found.pids("a")) == 2, "it is started again")
            assert len(forks) == 2 and not any(map(is_alive, forks))
            await found.until(lambda: len(found.pids("a", "fork")) == 4, "it has forked again")
            found.runner.stop()
            await asyncio.wait_for(found.done, 60)
            assert not any(map(is_alive, found.pids("a", "fork")))

    asyncio.run(test())


def test_other_processes_of_this_one_are_left_alone(ports: list[int]) -> None:
    async def test() -> None:
        async with running(stand_in("a", ports[0])) as found:
            await found.until(lambda: found.runner.supervisor.is_ready, "it is ready")
            os.kill(found.pids("a")[0], signal.SIGKILL)
            await found.until(lambda: found.ready.count("a") == 2, "it is ready again")

    with subprocess.Popen(["sleep", "600"]) as other:
        asyncio.run(test())
        assert other.poll() is None
        other.kill()


def test_a_cancelled_runner_leaves_no_process(ports: list[int]) -> None:
    async def test() -> None:
        async with running(stand_in("a", ports[0], "deaf")) as found:
            await found.until(lambda: found.runner.supervisor.is_ready, "it is ready")
            found.done.cancel()
            await asyncio.gather(found.done, return_exceptions=True)
            await found.until(lambda: not is_alive(found.pids("a")[0]), "it has ended")
            found.done = asyncio.create_task(asyncio.sleep(0))

    asyncio.run(test())
