"""Engines on one GPU that share one copy of their weights, which a service without a CUDA context keeps."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench import suite
from bench.model_dir import with_tokenizer
from tests.e2e.served import Served
from tests.e2e.test_shared_weights import engines, events, kill, loaded
from tests.gms import running as gms

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(300)]

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
PROMPTS = [[5, 6, 7] * 30, [9] * 50, list(range(3, 60))]


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    with with_tokenizer(Path(suite.model_dir("0.6b"))) as directory:
        yield directory


def processes_of_the_device() -> set[int]:
    """The processes that use the device."""
    query = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    return {int(pid) for pid in re.findall(r"\d+", subprocess.check_output(query, text=True))}


def tokens(engine: Served) -> list[list[int]]:
    params = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
    reply = engine.post("/generate", {"input_ids": PROMPTS, "sampling_params": params})
    assert reply.status_code == 200, reply.text
    return [each["output_ids"] for each in reply.json()]


def checksum(engine: Served) -> object:
    reply = engine.post("/weights_checker", {"action": "checksum"})
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=two_gpus)])
def test_two_engines_read_one_copy_and_outlive_its_loader_and_the_service(
    model: Path, tmp_path: Path, tp: int
) -> None:
    directory = tmp_path / "gms"
    given = ["--model", str(model), "--load-format", "dummy", "--num-kv-tokens", "65536"]
    given += ["--device", "cuda", "--gms-dir", str(directory), "--tp", str(tp)]
    service = gms.start(directory, "--devices", "all")
    try:
        gms.target(directory, tag="watch").close()
        with engines(given, given) as (first, second):
            before = tokens(first)
            assert tokens(second) == before and checksum(first) == checksum(second)
            assert service.pid not in processes_of_the_device(), "the service has a context"
            found = [event.kind for event in events(directory)]
            assert [found.count(kind) for kind in ("rw_granted", "sealed", "committed")] == [tp, tp, 1], found
            loader, reader = (first, second) if loaded(directory) in first.workers() else (second, first)
            kill(loader)
            assert tokens(reader) == before
            gms.end(service, signal.SIGKILL)
            assert tokens(reader) == before
    finally:
        if service.poll() is None:
            gms.end(service)
