"""Engines of different sizes in one group over gloo; `tests/gpu/test_one_group.py` has the same over NCCL."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.one_group import Ranks, check_updates
from tests.e2e.syncing import write_checkpoints


def test_engines_of_one_rank_and_of_two_get_the_same_update(tmp_path: Path) -> None:
    old, new = write_checkpoints(tmp_path, "qwen3")
    options = ("--dtype", "float32", "--num-kv-tokens", "1024", "--max-running-requests", "4")
    sent = check_updates(old, new, Ranks(options, trainer="cpu", buffer_mb=0.05, deadline_s=60))
    assert [each["backend"] for each in sent] == ["gloo", "gloo"]
