"""Memory of a GPU is released and resumed: the bytes go back, outputs stay equal, graphs are kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import segue
from bench.gpu_memory import PARAMS, PROMPTS, RETURNED, TAGS, cycles, least_returned
from tests.model_runner.tiny import save_llama

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_llama(directory, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, head_dim=128)
    return directory


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[segue.Engine]:
    # Released memory has no prefix cache, and other batches: equal tokens are promised with this option.
    options: dict[str, Any] = {"device": "cuda", "num_kv_tokens": 65536, "deterministic": True}
    options["enable_memory_saver"] = True
    with segue.Engine(str(model), **options) as engine:
        yield engine


def tokens(engine: segue.Engine) -> list[list[int]]:
    return [reply["output_ids"] for reply in engine.generate(input_ids=PROMPTS, sampling_params=PARAMS)]


@pytest.mark.parametrize("tags", TAGS, ids=", ".join)
def test_twenty_cycles(engine: segue.Engine, model: Path, tags: list[str]) -> None:
    found = cycles(engine, tags, 20, model)
    least, named = least_returned(found), found["named_bytes"]
    print(f"{', '.join(tags)}: at least {least:.1%} of {max(named) / 2**20:.0f} MiB are given back")
    assert least >= RETURNED, found


def test_a_sleep_of_level_1_brings_the_weights_back(engine: segue.Engine) -> None:
    before = tokens(engine)
    assert engine.sleep(1)["tags"] == ["kv_cache", "weights"]
    assert engine._runtime.trouble is not None
    engine.wake_up()
    assert engine._runtime.trouble is None and tokens(engine) == before


def test_requests_that_run_go_on_with_the_same_tokens(engine: segue.Engine) -> None:
    before = tokens(engine)
    streams = [engine.generate(input_ids=prompt, sampling_params=PARAMS, stream=True) for prompt in PROMPTS]
    for stream in streams:
        next(stream)
    engine.release_memory_occupation(["kv_cache"])
    engine.resume_memory_occupation(["kv_cache"])
    assert [list(stream)[-1]["output_ids"] for stream in streams] == before
