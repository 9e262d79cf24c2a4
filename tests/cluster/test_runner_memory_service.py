"""The memory service and its holder as children of a pod: one that was stopped is killed by its probes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from segue.cluster.children import ClusterHost, make_children
from segue.cluster.config import ClusterConfig
from segue.cluster.processes import ChildSpec
from segue.config import EngineConfig
from segue.failover.pod import Execution, ProbeKind
from segue.gms.transport import close
from tests.cluster.running import is_alive, running
from tests.gms.running import SLAB, manifest, target


@pytest.fixture
def children(tmp_path: Path) -> Iterator[list[ChildSpec]]:
    """Those of a real pod, with probes that come more often; their start is all that the delay is for."""
    config = ClusterConfig.with_shadows(EngineConfig(model="m", device="cpu"), 1, {})
    host = ClusterHost(
        environ=os.environ,
        gpus=[],
        num_cores=2,
        router_url="http://127.0.0.1:1",
        worker_ports=[2, 3],
        system_ports=[4, 5],
        failover_dir=str(tmp_path / "failover"),
        gms_dir=str(tmp_path / "gms"),
    )
    found = []
    for child in make_children(config, host):
        if child.name in ("gms", "gms-holder"):
            assert child.health is not None
            probe = child.health.probes[ProbeKind.LIVENESS]
            assert isinstance(probe.action, Execution)
            action = Execution(command=(*probe.action.command, "--timeout-s=0.3"))
            probe = replace(probe, action=action, initial_delay_s=2.0, period_s=0.1)
            found.append(replace(child, health=replace(child.health, probes={ProbeKind.LIVENESS: probe})))
    yield found


def test_one_that_was_stopped_is_killed_and_the_weights_are_there_again(
    children: list[ChildSpec], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with running(*children) as found:
            await found.until(lambda: found.runner.supervisor.is_ready, "both are ready")
            generation = await asyncio.to_thread(load, tmp_path / "gms")
            for stopped, ready in (
                ("gms", {"gms": 2, "gms-holder": 1}),
                ("gms-holder", {"gms": 2, "gms-holder": 2}),
            ):
                first = found.runner._processes[stopped].pid
                os.kill(first, signal.SIGSTOP)
                await found.until(lambda pid=first: not is_alive(pid), "it is killed")
                await found.until(lambda want=ready: Counter(found.ready) == want, "it alone is ready again")
                assert await asyncio.to_thread(current, tmp_path / "gms") == generation

    asyncio.run(test())
    lines = [text for text in caplog.messages if "is killed" in text]
    reason = "is killed: its livenessProbe failed 2 times in a row (it ended with exit code 1"
    for name, line in zip(("gms", "gms-holder"), lines, strict=True):
        assert line.startswith(f"{name} {reason}") and "timed out" in line, "the reason is the probe's own"


def load(directory: Path) -> int:
    """Commit one slab, as an engine does, whose end frees nothing."""
    with target(directory) as client:
        grant = client.ask(manifest())
        close(client.allocate(grant.lease, [SLAB]))
        client.seal(grant.lease, manifest(digests=(1,)))
        return client.commit(grant.lease)


def current(directory: Path) -> int | None:
    with target(directory, tag="watch") as client:
        return client.opened.current
