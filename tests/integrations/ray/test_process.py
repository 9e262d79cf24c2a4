"""A process within an actor: it is ready, ends, hangs, or is ended."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from segue.cluster.processes import HealthProbes
from segue.errors import ChildStartError
from segue.failover.pod import HttpGet, Probe, ProbeKind
from segue.integrations.ray.process import HostedProcess
from tests.cluster.running import free_port, is_alive, stand_in


@contextmanager
def hosted(*ways: str, lives: bool = False) -> Iterator[tuple[HostedProcess, queue.Queue[str]]]:
    ends: queue.Queue[str] = queue.Queue()
    with free_port() as reserved:
        port = reserved.getsockname()[1]
        spec = stand_in("engine", port, *ways)
        if lives:
            probe = Probe(action=HttpGet(path="/live", port=port), period_s=0.05, failure_threshold=2)
            spec = replace(spec, health=HealthProbes(probes={ProbeKind.LIVENESS: probe}, ports={}))
        process = HostedProcess(spec, ends.put)
        try:
            yield process, ends
        finally:
            process.stop(0.0)
            assert not is_alive(process.pid)


def test_the_actor_hears_of_the_end_of_a_process_that_was_ready() -> None:
    with hosted() as (process, ends):
        process.wait_ready()
        os.kill(process.pid, signal.SIGKILL)
        assert ends.get(timeout=10).startswith("by signal SIGKILL")


def test_a_process_that_ends_before_it_is_ready_is_an_error_of_the_start() -> None:
    with hosted("exit") as (process, ends):
        with pytest.raises(ChildStartError, match="engine ended with exit code 3 before it was ready"):
            process.wait_ready()
        assert ends.empty()


def test_a_program_that_does_not_exist_is_too() -> None:
    process = HostedProcess(replace(stand_in("engine", 1), command=("/no/such/program",)), print)
    with pytest.raises(ChildStartError, match="No such file"):
        process.wait_ready()
    process.stop(0.0)


def test_probes_kill_a_process_that_hangs(tmp_path: Path) -> None:
    sick = tmp_path / "sick"
    with hosted(f"sick={sick}", lives=True) as (process, ends):
        process.wait_ready()
        sick.touch()
        assert ends.get(timeout=10).startswith("because its livenessProbe failed 2 times in a row")
        assert not is_alive(process.pid)


@pytest.mark.parametrize(("ways", "drain_s"), [(("slow",), 10.0), (("deaf",), 0.2)])
def test_a_stop_waits_for_the_drain_then_kills_and_is_no_crash(ways: tuple[str, ...], drain_s: float) -> None:
    with hosted(*ways) as (process, ends):
        process.wait_ready()
        process.stop(drain_s)
        assert not is_alive(process.pid)
        assert ends.empty()
