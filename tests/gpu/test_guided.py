"""The first guided request of an engine on a CUDA device: the others go on while its processes start."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

import segue
from tests.conftest import WaitUntil

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PARAMS = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}


def gap_beside_the_first_guided_request(engine: segue.Engine, wait_until: WaitUntil) -> tuple[float, float]:
    """Return the longest time between two updates of other requests meanwhile, and the guided one's time."""
    updates, done = list[float](), threading.Event()

    def others() -> None:
        while not done.is_set():
            for _ in engine.generate("Hello world", PARAMS, stream=True):
                updates.append(time.perf_counter())

    engine.generate("Hello world", PARAMS)
    thread = threading.Thread(target=others)
    thread.start()
    wait_until(lambda: len(updates) > 100)
    began = time.perf_counter()
    reply = engine.generate("numbers", {"temperature": 0, "max_new_tokens": 9, "regex": "[0-9]{3}"})
    took = time.perf_counter() - began
    done.set()
    thread.join()
    assert reply["text"].isdecimal() and len(reply["text"]) == 3
    times = [began, *(each for each in updates if began < each < began + took), began + took]
    return max(later - earlier for earlier, later in pairwise(times)), took


def test_other_requests_go_on_while_the_processes_start(tiny_model: Path, wait_until: WaitUntil) -> None:
    options = {"load_format": "dummy", "device": "cuda", "max_running_requests": 8, "num_kv_tokens": 4096}
    with segue.Engine(model=str(tiny_model), log_level="error", **options) as engine:
        gap, took = gap_beside_the_first_guided_request(engine, wait_until)
    print(f"the first guided request took {took:.3f} s; others waited {gap:.3f} s at most")
    assert gap < took / 2, (gap, took)
