"""Engines that share one copy of their weights: who loads, who dies, and what is refused."""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from segue.gms.messages import ServiceEvent
from tests.conftest import least_measured
from tests.e2e.served import Served, serve
from tests.e2e.slabs import slabs_of
from tests.e2e.syncing import file_of, write_checkpoints
from tests.gms import running as gms
from tests.launch.test_processes import is_alive
from tests.support.child import start_child

PROMPTS = ("abc", "Once upon a time", "x y z")


def options(model: Path) -> list[str]:
    found = ["--model", str(model), "--load-format", "dummy", "--dtype", "float32", "--device", "cpu"]
    return [*found, "--num-kv-tokens", "4096"]


def refused_start(*given: str) -> subprocess.Popen[str]:
    """Begin to start an engine that cannot start."""
    command = [sys.executable, "-m", "segue", "serve", "--port", "0", *given]
    return start_child(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@contextmanager
def engines(*each: list[str]) -> Iterator[list[Served]]:
    """Runs engines, which start at the same time."""
    with ExitStack() as stack, ThreadPoolExecutor(len(each)) as pool:
        yield list(pool.map(lambda given: stack.enter_context(serve(*given)), each))


def tokens(engine: Served) -> list[list[int]]:
    """The tokens that an engine generates."""
    params = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    reply = engine.post("/generate", {"text": list(PROMPTS), "sampling_params": params})
    assert reply.status_code == 200, reply.text
    return [each["output_ids"] for each in reply.json()]


def events(directory: Path) -> list[ServiceEvent]:
    """What has happened in the service."""
    with gms.target(directory, tag="watch") as client:
        return client.events()


def loaded(directory: Path) -> int:
    """The process that the weights were granted to in order to be loaded; of several ranks, the first."""
    text = next(event.text for event in events(directory) if event.kind == "rw_granted")
    found = re.search(r"\(pid (\d+)\)", text)
    assert found is not None, text
    return int(found[1])


def kill(engine: Served) -> None:
    """Kill an engine, and wait until its ranks are gone too."""
    ranks = engine.workers()
    engine.process.kill()
    engine.process.wait(gms.DEADLINE_S)
    gms.until(lambda: not any(map(is_alive, ranks)), "the end of the ranks")


def checksum(engine: Served) -> object:
    """The checksum of the weights that an engine serves."""
    return engine.get("/weights_checker").json()["total"]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[list[int]]:
    """The tokens of an engine that has weights of its own."""
    with serve(*options(tiny_model)) as engine:
        assert slabs_of(engine.workers())[0] == 0
        return tokens(engine)


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_two_engines_read_one_copy_of_the_weights(
    tiny_model: Path, tmp_path: Path, expected: list[list[int]], tp: int
) -> None:
    directory = tmp_path / "gms"
    given = [*options(tiny_model), "--gms-dir", str(directory), "--tp", str(tp)]
    with gms.running(directory) as service, engines(given, given) as (first, second):
        before = tokens(first)
        assert before == tokens(second)
        if tp == 1:  # sums over two ranks round in another way
            assert before == expected
        found = [event.kind for event in events(directory)]
        assert [found.count(kind) for kind in ("rw_granted", "sealed", "committed")] == [tp, tp, 1], found
        assert found.count("ro_granted") >= tp, found
        other = [*given, "--dtype", "bfloat16"]  # of two options with the same name the last one counts
        stranger = refused_start(*other) if tp == 1 else None
        mapped = [slabs_of(engine.workers()) for engine in (first, second)]
        copy = mapped[0][0]
        assert copy > 0 and [size for size, _, _ in mapped] == [copy, copy]
        assert sum(share for _, share, _ in mapped) <= 1.02 * copy, mapped
        assert mapped[0][2] == mapped[1][2] == {"r--p"}, "nobody may write to them"

        reply = second.post("/weights_checker", {"action": "checksum"})
        assert reply.status_code == 200, reply.text
        if stranger is not None:
            log = stranger.communicate(timeout=gms.DEADLINE_S)[0]
            assert stranger.returncode == 1, log
            assert "weights: dtype is 'float32', and this engine has 'bfloat16'" in " ".join(log.split()), log
        loader, reader = (first, second) if loaded(directory) in first.workers() else (second, first)
        kill(loader)
        assert tokens(reader) == before
        gms.end(service, signal.SIGKILL)
        assert tokens(reader) == before
        gms.until(lambda: bool(reader.get("/health").json().get("owner_lost")), "nobody hears of it")


def test_an_engine_with_other_bytes_of_one_tensor_does_not_start(tmp_path: Path) -> None:
    """The header of its file, its name and its size are the same; those who read the weights go on."""
    (model,) = write_checkpoints(tmp_path, "qwen3", 1)
    file, name = file_of(model), "model.layers.1.mlp.down_proj.weight"
    directory = tmp_path / "gms"
    given = ["--model", str(model), "--dtype", "float32", "--device", "cpu", "--num-kv-tokens", "4096"]
    given += ["--gms-dir", str(directory)]
    with gms.running(directory), serve(*given) as engine:
        before, size = checksum(engine), file.stat().st_size
        with file.open("r+b") as weights:
            num_header = 8 + int.from_bytes(weights.read(8), "little")
            header = weights.read(num_header - 8)
            start, end = json.loads(header)[name]["data_offsets"]
            weights.seek(num_header + start)
            assert any(weights.read(end - start))
            weights.seek(num_header + start)
            weights.write(bytes(end - start))
        assert file.stat().st_size == size and file.read_bytes()[8:num_header] == header
        stranger = refused_start(*given)
        log = " ".join(stranger.communicate(timeout=gms.DEADLINE_S)[0].split())
        assert stranger.returncode == 1, log
        assert "source[model.safetensors].stamp is" in log and "or another --cohort" in log, log
        assert checksum(engine) == before
        assert [event.kind for event in events(directory)].count("committed") == 1


@pytest.mark.alone
def test_an_engine_that_shall_not_outlive_the_service_ends_within_a_second(
    tiny_model: Path, tmp_path: Path
) -> None:
    directories = (tmp_path / f"gms{index}" for index in itertools.count())
    assert least_measured(1.0, lambda: seconds_without_the_service(tiny_model, next(directories))) < 1.0


def seconds_without_the_service(tiny_model: Path, directory: Path) -> float:
    with (
        gms.running(directory) as service,
        serve(*options(tiny_model), "--gms-dir", str(directory), "--on-gms-loss", "exit") as engine,
    ):
        gms.end(service, signal.SIGKILL)
        began = time.monotonic()
        assert engine.process.wait(gms.DEADLINE_S) == 1
        return time.monotonic() - began
