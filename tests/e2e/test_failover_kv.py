"""``segue serve --shadows`` with --kv-owner gms: the KV memory of a killed engine is its successor's."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from segue.cluster.pod_process import COHORT, PodProcess
from tests.conftest import WaitUntil
from tests.e2e.clustering import descendants
from tests.e2e.test_failover import gms_dir, memory_processes, model_of
from tests.gms import running as gms
from tests.support.streams import ReplyGroup, every_kind

TOKENS = 120
KV_TOKENS = 1 << 16


@pytest.fixture(scope="module")
def pod(tiny_model: Path) -> Iterator[PodProcess]:
    options = ["--device=cpu", f"--model={tiny_model}", "--load-format=dummy", "--deterministic"]
    with PodProcess([*options, "--kv-owner=gms", f"--num-kv-tokens={KV_TOKENS}"]) as found:
        yield found


def kv_of(pod: PodProcess) -> list[dict[str, Any]]:
    with gms.target(gms_dir(pod), tag="watch") as client:
        found: list[dict[str, Any]] = client.status()["kv"]
    return found


def grants(pod: PodProcess) -> list[str]:
    """What the service says of each grant so far: whether the memory is fresh."""
    with gms.target(gms_dir(pod), tag="watch") as client:
        texts = [event.text for event in client.events() if event.kind == "kv_granted"]
    return ["fresh" if " fresh, " in text else "handed on" for text in texts]


def writers_of_kv(pod: PodProcess) -> set[int]:
    """The processes that can write to slabs of the service."""
    found = set()
    for pid in descendants(pod.process.pid):
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except FileNotFoundError:
            continue
        if any("rw-s" in line and "memfd:segue-slab" in line for line in lines):
            found.add(pid)
    return found


@pytest.mark.slow  # `test_warm_kv` hands memory on, and `test_failover` has streams of every kind
@pytest.mark.timeout(300)
def test_the_memory_of_a_killed_engine_is_its_successors_and_no_client_notices(
    pod: PodProcess, wait_until: WaitUntil
) -> None:
    pod.wait_for_standby()
    requests = every_kind(model_of(pod), TOKENS)
    expected = ReplyGroup.send(pod.url, requests).end()
    assert not any(isinstance(each, str) for each in expected), expected
    (before,) = kv_of(pod)
    assert (before["cohort"], before["phase"]) == (COHORT, "leased") and before["bytes"] > 0
    assert len(writers_of_kv(pod)) == 1, "an engine that stands by has none of it"
    group = ReplyGroup.send(pod.url, requests)
    wait_until(lambda: group.have_begun(10), timeout=30, what="the streams have begun")
    times = pod.kill_serving("engine")
    assert group.end() == expected
    (after,) = kv_of(pod)
    assert (after["bytes"], after["phase"]) == (before["bytes"], "leased")
    assert f"/{times.successor.engine} rank 0" in after["user"]
    assert grants(pod) == ["fresh", "handed on"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_the_service_the_successor_serves_with_memory_of_its_own(
    pod: PodProcess, wait_until: WaitUntil
) -> None:
    """Then the service is there again, and the engine after that one gets memory that nobody writes to."""
    pod.wait_for_standby()
    requests = every_kind(model_of(pod), TOKENS)
    expected = ReplyGroup.send(pod.url, requests).end()
    group = ReplyGroup.send(pod.url, requests)
    wait_until(lambda: group.have_begun(10), timeout=30, what="the streams have begun")
    service = memory_processes(pod)["serve"]
    os.kill(service, signal.SIGSTOP)  # its supervisor would start a killed one again at once
    try:
        times = pod.kill_serving("engine")
        assert group.end() == expected
    finally:
        os.kill(service, signal.SIGKILL)
    assert times.record_s < 9, "the wake has waited for the service no longer than it should"
    wait_until(
        lambda: memory_processes(pod).get("serve") not in (None, service), timeout=60, what="a service"
    )
    assert writers_of_kv(pod) == set()
    pod.wait_for_standby()

    def has_engines() -> bool:
        with gms.target(gms_dir(pod), tag="watch") as client:
            engines = {each["engine"] for each in client.status()["sessions"] if each["tag"] == "weights"}
        return len(engines) == 2

    wait_until(has_engines, timeout=60, what="both engines are known again")
    assert kv_of(pod) == []
    group = ReplyGroup.send(pod.url, requests)
    wait_until(lambda: group.have_begun(10), timeout=30, what="the streams have begun")
    pod.kill_serving("engine")
    assert group.end() == expected
    assert grants(pod) == ["fresh"] and len(writers_of_kv(pod)) == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stopped_process_of_the_dead_engine_is_killed_before_its_memory_is_handed_on(
    pod: PodProcess, wait_until: WaitUntil
) -> None:
    """The frontend is killed while its worker is stopped: the kernel kills it, and its pidfd proves that."""
    for _ in range(2):
        pod.wait_for_standby()
        (worker,) = writers_of_kv(pod)
        os.kill(worker, signal.SIGSTOP)
        pod.kill_serving("front")
        assert len(writers_of_kv(pod) - {worker}) == 1
        body = {"text": "x", "sampling_params": {"max_new_tokens": 2}}
        assert httpx.post(f"{pod.url}/generate", json=body, timeout=30).status_code == 200
        assert grants(pod)[-1] == "handed on"
