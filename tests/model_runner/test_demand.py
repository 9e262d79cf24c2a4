"""The memory that a rank needs is known before anything is loaded: never more than it then takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from segue.checkpoint.source import resolve
from segue.config import EngineConfig
from segue.distributed.info import TPInfo
from segue.errors import OutOfMemoryError
from segue.memory.budget import plan_pages
from segue.model_runner.demand import least_demand, weight_bytes
from segue.model_runner.start_choice import choose_start
from tests.model_runner import making, tiny


@pytest.mark.parametrize("save", [tiny.save_llama, tiny.save_qwen3_moe])
def test_the_weights_have_the_bytes_of_the_arena(save: Callable[[Path], Any], tmp_path: Path) -> None:
    save(tmp_path)
    runner = making.make_runner(tmp_path)
    try:
        source = resolve(str(tmp_path), "auto", tmp_path)
        assert weight_bytes(source.config, TPInfo(), torch.float32) == runner.weight_bytes
    finally:
        runner.close()


@pytest.mark.parametrize("save", [tiny.save_llama, tiny.save_qwen3_moe])
def test_the_values_of_weights_in_fp8_are_known_to_be_copied_on_a_cpu(
    save: Callable[[Path], Any], tmp_path: Path
) -> None:
    save(tmp_path)
    runner = making.make_runner(tmp_path, quantization="fp8")
    try:
        copied = runner._startup._derived
    finally:
        runner.close()
    config = EngineConfig(**making.options(tmp_path, quantization="fp8"))
    source = resolve(config.model, "auto", tmp_path, quantization="fp8")
    chosen = choose_start(config, source, TPInfo())
    needed = least_demand(config, chosen.resolved, source.config, TPInfo(), free_before=0)
    assert 0.5 * copied < needed.reserve.derived <= copied


def test_a_model_that_cannot_fit_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    tiny.save_llama(tmp_path)
    config = EngineConfig(**making.options(tmp_path, num_kv_tokens=None))
    source = resolve(config.model, "auto", tmp_path)
    chosen = choose_start(config, source, TPInfo())
    needed = least_demand(config, chosen.resolved, source.config, TPInfo(), free_before=0)
    assert needed.arena_bytes == weight_bytes(source.config, TPInfo(), chosen.resolved.dtype)
    assert needed.reserve.activations > 0 == needed.reserve.graphs
    enough = round(1.2 * (needed.fixed_bytes + 8 * needed.page_bytes) / config.memory_ratio)
    for free, fits in ((enough, True), (needed.fixed_bytes, False)):
        demand = least_demand(config, chosen.resolved, source.config, TPInfo(), free_before=free)
        if fits:
            assert plan_pages(demand).num_pages >= 2
        else:
            with pytest.raises(OutOfMemoryError, match="at least 2 are needed"):
                plan_pages(demand)
