"""``segue serve --shadows --warm-kv``: a successor goes on with the prefix cache of a killed engine."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from segue.cluster.pod_process import EnginePart, PodProcess
from tests.conftest import WaitUntil
from tests.e2e.syncing import write_checkpoints
from tests.e2e.test_failover import memory_processes, model_of
from tests.support.streams import ReplyGroup, every_kind

PREFIX = [(7 * index + 3) % 60 for index in range(448)]
OPTIONS = ["--device=cpu", "--load-format=dummy", "--deterministic", "--warm-kv", "--num-kv-tokens=16384"]


@pytest.fixture(scope="module")
def pod(tiny_model: Path) -> Iterator[PodProcess]:
    with PodProcess([*OPTIONS, f"--model={tiny_model}"]) as found:
        yield found


def generate(pod: PodProcess, *suffix: int) -> tuple[list[int], int]:
    """Returns the output of the prefix with a suffix, and how many of its tokens were cached."""
    sampling = {"max_new_tokens": 12, "temperature": 0.8, "sampling_seed": 3, "ignore_eos": True}
    body = {"input_ids": [*PREFIX, *suffix], "sampling_params": sampling}
    reply = httpx.post(f"{pod.url}/generate", json=body, timeout=60)
    reply.raise_for_status()
    found: dict[str, Any] = reply.json()
    return found["output_ids"], found["meta_info"]["cached_tokens"]


def kill_serving(pod: PodProcess, part: EnginePart = "engine") -> None:
    """Kill the engine that serves; `last_wake` is then that of its successor."""
    pod.log.clear()
    pod.kill_serving(part)


def last_wake(pod: PodProcess, wait_until: WaitUntil) -> str:
    """What the engine that woke last has logged of its KV; its record may be there before the line."""

    def lines() -> list[str]:
        return [line.partition("KV is ")[2] for line in list(pod.log) if "KV is " in line]

    wait_until(lines, what="the line of the engine that has woken")
    return lines()[-1]


@pytest.mark.timeout(180)
def test_the_prefix_of_a_killed_engine_is_not_computed_again(pod: PodProcess, wait_until: WaitUntil) -> None:
    pod.wait_for_standby()
    assert last_wake(pod, wait_until).startswith("cold: its memory is new")
    expected = {suffix: generate(pod, suffix)[0] for suffix in (1, 2, 3)}
    assert generate(pod, 9)[1] == len(PREFIX)
    requests = every_kind(model_of(pod), 60)
    replies = ReplyGroup.send(pod.url, requests).end()
    group = ReplyGroup.send(pod.url, requests)
    wait_until(lambda: group.have_begun(8), timeout=30, what="the streams have begun")
    parts: tuple[EnginePart, ...] = ("engine", "workers")
    for part in parts:  # the second kill is of an engine that has adopted pages itself
        pod.wait_for_standby()
        kill_serving(pod, part)
        assert group.end() == replies
        found = re.match(r"warm: (\d+) pages of the engine before, (\d+) tokens", last_wake(pod, wait_until))
        assert found is not None and int(found[2]) == 16 * int(found[1]) >= len(PREFIX)
        for suffix, output in expected.items():
            again, num_cached = generate(pod, suffix)
            assert (again, num_cached >= 0.9 * len(PREFIX)) == (output, True)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_planned_switch_keeps_the_cache_too(pod: PodProcess, wait_until: WaitUntil) -> None:
    pod.wait_for_standby()
    expected, before = generate(pod, 1)[0], pod.serving()
    os.kill(pod.pid(), signal.SIGTERM)
    wait_until(lambda: pod.serving() not in (None, before), timeout=60, what="another engine serves")
    assert generate(pod, 1) == (expected, len(PREFIX))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_what_was_flushed_does_not_come_back(pod: PodProcess, wait_until: WaitUntil) -> None:
    pod.wait_for_standby()
    expected = generate(pod, 1)[0]
    assert httpx.post(f"{pod.url}/flush_cache", timeout=30).status_code == 200
    kill_serving(pod)
    assert last_wake(pod, wait_until).startswith("cold: the engine before has left none")
    assert generate(pod, 1) == (expected, 0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_the_service_or_after_its_restart_the_cache_begins_empty(
    pod: PodProcess, wait_until: WaitUntil
) -> None:
    pod.wait_for_standby()
    expected = generate(pod, 1)[0]
    service = memory_processes(pod)["serve"]
    os.kill(service, signal.SIGSTOP)
    try:
        kill_serving(pod)
        assert generate(pod, 1) == (expected, 0)
        assert last_wake(pod, wait_until).startswith("cold: its memory is this engine's own")
    finally:
        os.kill(service, signal.SIGKILL)
    wait_until(
        lambda: memory_processes(pod).get("serve") not in (None, service), timeout=60, what="a service"
    )
    pod.wait_for_standby()
    kill_serving(pod)
    assert generate(pod, 1) == (expected, 0)
    assert last_wake(pod, wait_until).startswith("cold: its memory is new")
    pod.wait_for_standby()
    kill_serving(pod)
    assert generate(pod, 1) == (expected, len(PREFIX)), "and then it is warm again"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_go_on_with_the_pages_of_two_ranks(tiny_model: Path) -> None:
    with PodProcess([*OPTIONS, f"--model={tiny_model}", "--tp=2"]) as pod:
        pod.wait_for_standby()
        expected = generate(pod, 1)[0]
        for _ in range(2):
            pod.wait_for_standby()
            kill_serving(pod)
            assert generate(pod, 1) == (expected, len(PREFIX))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kv_of_weights_that_were_updated_is_left_alone(tmp_path: Path) -> None:
    """KV of the new weights is taken over, though."""
    one, other = write_checkpoints(tmp_path, "qwen3", max_position_embeddings=512)
    options = [option for option in OPTIONS if option != "--load-format=dummy"]
    with PodProcess([*options, f"--model={one}"]) as pod:
        pod.wait_for_standby()
        before = generate(pod, 1)[0]
        reply = httpx.post(f"{pod.url}/update_weights_from_disk", json={"model_path": str(other)}, timeout=60)
        assert reply.status_code == 200, reply.text
        kill_serving(pod)
        after, num_cached = generate(pod, 1)
        assert num_cached == 0 and after != before
        pod.wait_for_standby()
        kill_serving(pod)
        assert generate(pod, 1) == (after, len(PREFIX))
