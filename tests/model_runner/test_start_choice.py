"""What a rank chooses before it loads anything; the tests of each part are with the parts."""

from __future__ import annotations

from pathlib import Path

import torch

from segue.checkpoint.source import resolve
from segue.config import EngineConfig
from segue.distributed.info import TPInfo
from segue.model_runner.start_choice import choose_start
from tests.model_runner import making, tiny


def test_the_backends_are_chosen_for_the_shard_and_the_device(tmp_path: Path) -> None:
    tiny.save_llama(tmp_path)
    config = EngineConfig(**making.options(tmp_path, deterministic=True, tp=2))
    chosen = choose_start(config, resolve(config.model, "auto", tmp_path), TPInfo(1, 2))
    assert (chosen.setting.shape.num_heads, chosen.setting.shape.num_kv_heads) == (4, 2)
    assert (chosen.setting.device, chosen.setting.page_size) == (torch.device("cpu"), 4)
    assert chosen.setting.max_requests == chosen.resolved.max_running_requests > 1
    assert chosen.selection.name == "cpu-invariant"
    assert chosen.selection.why.endswith("runs on cpu, and is deterministic")
