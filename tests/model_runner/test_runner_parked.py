"""A runner that stands by has the first and the scratch page of its KV cache alone, until it wakes."""

from pathlib import Path
from typing import Any

import pytest

from segue.memory.memfd import GRANULARITY
from segue.memory.releasable import ReleasableMemory
from segue.model_runner.runner import ModelRunner
from tests.model_runner import making, tiny
from tests.model_runner.planner import Planner

SAVER = {"enable_memory_saver": True, "shadow_mode": True, "num_kv_tokens": 65536}


def mapped_kv(runner: ModelRunner) -> int:
    memory = runner.memory
    assert isinstance(memory, ReleasableMemory)
    return memory._ranges["kv_cache"].window.mapped_bytes


def output(runner: ModelRunner) -> list[int]:
    return Planner(runner).generate(making.prompt(30), 12, chunk=7).output


def test_a_parked_runner_starts_and_wakes_with_the_same_results(tmp_path: Path) -> None:
    tiny.save_llama(tmp_path)
    plain = making.make_runner(tmp_path, num_kv_tokens=65536)
    expected = output(plain)
    plain.close()
    runner = making.make_runner(tmp_path, **SAVER)
    assert mapped_kv(runner) == 2 * GRANULARITY < runner.kv_bytes
    runner.wake()
    assert mapped_kv(runner) >= runner.kv_bytes
    assert output(runner) == expected
    runner.close()


@pytest.mark.parametrize("changes", [{"shadow_mode": False}, {"enable_laps_scheduler": True}])
def test_only_a_shadow_whose_start_runs_no_steps_is_parked(tmp_path: Path, changes: Any) -> None:
    tiny.save_llama(tmp_path)
    runner = making.make_runner(tmp_path, **SAVER | changes)
    assert mapped_kv(runner) >= runner.kv_bytes
    runner.wake()
    runner.close()
