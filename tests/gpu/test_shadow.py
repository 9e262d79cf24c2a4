"""Engines of a pod on one GPU or two: what one that stands by takes of it, and takeovers without growth.

Each with the KV cache as memory of the service, which is handed on, and as memory of each engine.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch

from bench import suite
from bench.model_dir import with_tokenizer
from segue.cluster.pod_process import PodProcess
from tests.gms import running as gms

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(400)]

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
GIB = 1 << 30
NUM_KV_TOKENS = 1 << 18  # 28 GiB of the smaller model: an engine that stands by with all of it would show
PARKED_BYTES = 1.5 * GIB  # that one more engine may take
TAKEOVERS = 4
GREEDY = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}


@contextmanager
def options_of(model: str, kv_owner: str) -> Iterator[list[str]]:
    with with_tokenizer(Path(suite.model_dir(model))) as path:
        found = ["--model", str(path), "--load-format", "dummy", "--device", "cuda"]
        yield [*found, "--num-kv-tokens", str(NUM_KV_TOKENS), "--kv-owner", kv_owner]


@pytest.fixture(params=[("auto", 1), ("private", 1), pytest.param(("auto", 2), marks=two_gpus)], ids=str)
def options(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    kv_owner, tp = request.param
    with options_of("0.6b", kv_owner) as found:
        yield [*found, "--tp", str(tp)]


def used() -> int:
    """The bytes that all processes use of the device that this process sees first."""
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    query = ["nvidia-smi", f"--id={device}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(re.findall(r"\d+", subprocess.check_output(query, text=True))[0]) << 20


def tokens(pod: PodProcess) -> list[int]:
    body = {"text": "abc", "sampling_params": GREEDY}
    reply = httpx.post(f"{pod.url}/generate", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    found: list[int] = reply.json()["output_ids"]
    return found


def kv_grants(pod: PodProcess) -> list[bool]:
    """Whether each grant of KV memory so far was fresh memory."""
    with gms.target(next(pod.directory.glob("segue-*/gms")), tag="watch") as client:
        return [" fresh, " in event.text for event in client.events() if event.kind == "kv_granted"]


@pytest.mark.parametrize("model, kv_owner", [("0.6b", "auto"), ("0.6b", "private"), ("8b", "auto")])
def test_an_engine_that_stands_by_takes_little_of_the_device(model: str, kv_owner: str) -> None:
    found = []
    with options_of(model, kv_owner) as options:
        for shadows in (1, 2):
            with PodProcess(options, shadows=shadows) as pod:
                pod.wait_for_standby(count=shadows)
                tokens(pod)
                found.append(used())
    print(f"{model}, KV {kv_owner}: one more engine takes {(found[1] - found[0]) / GIB:.2f} GiB")
    assert found[1] - found[0] <= PARKED_BYTES, found


def test_takeovers_leave_nothing_on_the_device(options: list[str]) -> None:
    with PodProcess(options) as pod:
        found, replies = [], []
        for _ in range(TAKEOVERS + 1):
            pod.wait_for_standby()
            replies.append(tokens(pod))
            found.append(used())
            pod.kill_serving("engine")
        assert all(reply == replies[0] for reply in replies)
        assert max(found[1:]) - found[0] <= 0.02 * found[0], found
        is_handed_on, ranks = "auto" in options, int(options[-1])
        expected = [True] * ranks + [False] * ((TAKEOVERS - 1) * ranks) if is_handed_on else []
        assert kv_grants(pod)[: TAKEOVERS * ranks] == expected
