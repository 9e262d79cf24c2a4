"""`--deterministic` on the CPU: a retraction changes no bit. tests/gpu has the same tests for CUDA."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

import segue
from tests.e2e.engines import check_retracted_is_uninterrupted
from tests.model_runner import making, tiny

TEXT = (
    "The old lighthouse keeper counted the ships each evening, wrote their names into a book, and never once "
    "asked where they were going, because the answer would not have changed the light. "
) * 3


def test_retracting_a_small_model_changes_no_bit(tmp_path: Path) -> None:
    tiny.save_llama(tmp_path)
    options = making.options(tmp_path, num_kv_tokens=8192, max_running_requests=32, deterministic=True)
    prompts = [making.prompt(1 + 2 * index, seed=index) for index in range(32)]
    with segue.Engine(**options, embedded=True, log_level="error") as engine:
        check_retracted_is_uninterrupted(engine, prompts, 60, pauses=3, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_retracting_32_requests_3_times_each_changes_no_bit(dtype: str) -> None:
    random = Random(4)
    prompts = [TEXT[(at := random.randrange(200)) : at + random.randrange(10, 300)] for _ in range(32)]
    options = {"dtype": dtype, "num_kv_tokens": 8192, "max_running_requests": 32, "log_level": "error"}
    with segue.Engine(deterministic=True, **options) as engine:
        for seed in range(3):
            check_retracted_is_uninterrupted(engine, prompts, 64, pauses=3, seed=seed)
