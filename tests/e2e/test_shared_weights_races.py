"""Engines that start at the same time share one copy of the weights, whoever is first and whoever dies."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.e2e.served import serve
from tests.gms import running as gms
from tests.launch.test_processes import is_alive
from tests.support import watched_loading
from tests.support.child import start_child
from tests.support.tiny_model import write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
START_S = 60.0
SCHEDULES = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with weights on disk."""
    directory = write_model(tmp_path_factory.mktemp("races") / "model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).save_pretrained(directory)
    return directory


class RacingEngine:
    """One of several engines that start at the same time; it is killed at the end of the ``with`` block."""

    def __init__(self, model: Path, gms_dir: Path, tp: int, **environment: str) -> None:
        options = {"model": str(model), "dtype": "float32", "device": "cpu", "num_kv_tokens": 1024, "tp": tp}
        options |= {"port": 0, "gms_dir": str(gms_dir), "deterministic": True, "exit_grace": 0.0}
        self.process = start_child(
            [sys.executable, watched_loading.__file__, json.dumps(options)],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> RacingEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def tokens(self) -> list[int]:
        """What the engine generates, once it is ready."""
        assert self.process.stdout is not None
        ready = self.process.stdout.readline()
        assert ready.startswith("ready "), ready
        return generated(ready.split()[1])


def generated(url: str) -> list[int]:
    params = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
    body = {"text": "Once upon a time", "sampling_params": params}
    found: list[int] = httpx.post(f"{url}/generate", json=body, timeout=START_S).json()["output_ids"]
    return found


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[int, list[int]]:
    """The tokens of an engine that has weights of its own, by its number of ranks."""
    options = ["--model", str(model), "--dtype=float32", "--device=cpu", "--num-kv-tokens=1024"]
    found = {}
    for tp in (1, 2):
        with serve(*options, "--deterministic", f"--tp={tp}") as engine:
            found[tp] = generated(engine.url)
    return found


@contextmanager
def service(directory: Path) -> Iterator[Path]:
    with gms.running(directory):
        yield directory


def loads(file: Path) -> Counter[int]:
    """The bytes that each engine has read, by its server's process."""
    found: Counter[int] = Counter()
    for line in file.read_text().splitlines():
        server, _, num_bytes = map(int, line.split())
        found[server] += num_bytes
    return found


@pytest.mark.parametrize("tp", [1, 2])
def test_of_two_engines_that_race_one_loads(
    model: Path, tmp_path: Path, expected: dict[int, list[int]], tp: int
) -> None:
    rng = random.Random(tp)
    sizes = set()
    for number in range(SCHEDULES):
        file = tmp_path / f"loads-{number}"
        with service(tmp_path / f"gms-{number}") as directory:
            first = RacingEngine(model, directory, tp, LOADS=str(file))
            time.sleep(rng.choice([0.0, 0.01, 0.1, 0.5]))  # which one is first differs from turn to turn
            with first, RacingEngine(model, directory, tp, LOADS=str(file)) as second:
                assert [first.tokens(), second.tokens()] == [expected[tp]] * 2
        assert len(loads(file)) == 1, "one engine reads the files"
        sizes |= set(loads(file).values())
    assert len(sizes) == 1, "it reads each byte once"


@pytest.mark.parametrize("moment", ["0.01", "0.5", "0.99", "commit"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_loader_that_dies_leaves_the_load_to_the_next_engine(
    model: Path, tmp_path: Path, expected: dict[int, list[int]], tp: int, moment: str
) -> None:
    file, stopped = tmp_path / "loads", tmp_path / "stopped"
    environment = {"LOADS": str(file), "STOPPED": str(stopped), "STOP_AT": moment}
    with (
        service(tmp_path / "gms") as directory,
        RacingEngine(model, directory, tp, **environment) as one,
        RacingEngine(model, directory, tp, **environment) as other,
    ):
        gms.until(stopped.exists, "a worker that has stopped", START_S)
        server, worker = map(int, stopped.read_text().split())
        doomed, survivor = (one, other) if one.process.pid == server else (other, one)
        assert doomed.process.pid == server
        os.kill(worker, signal.SIGKILL)
        began = time.monotonic()
        assert survivor.tokens() == expected[tp]
        print(f"tp {tp}, killed at {moment}: the next engine serves after {time.monotonic() - began:.2f} s")
        assert doomed.process.wait(START_S) != 0
        gms.until(lambda: not is_alive(worker), "the end of the worker")
        read = loads(file)
        assert set(read) == {server, survivor.process.pid}
        with RacingEngine(model, directory, tp, LOADS=str(file)) as third:
            assert third.tokens() == expected[tp]
            assert loads(file) == read, "it has the weights of the engine that survived"
        if moment == "commit":
            assert len(set(read.values())) == 1, "each has read all of it once"
        else:
            assert read[server] <= read[survivor.process.pid]
