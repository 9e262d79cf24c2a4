"""Provides the model and the prompts for all engines: random ids, so that no prefix is cached by chance."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from segue.checkpoint.bundled import ensure_bundled_model
from segue.config import EngineConfig

FIRST_ORDINARY_ID = 300  # lower ids are special tokens and single bytes
LAST_ORDINARY_ID = 49_000


def bundled_model() -> Path:
    """Return the path of the bundled model's GGUF file."""
    return ensure_bundled_model(Path(EngineConfig.create().cache_dir))


def prompts(count: int, length: int, *, seed: int) -> list[list[int]]:
    """Draw ``count`` prompts of ``length`` token ids."""
    rng = random.Random(f"{seed} {count} {length}")
    return [[rng.randint(FIRST_ORDINARY_ID, LAST_ORDINARY_ID) for _ in range(length)] for _ in range(count)]


def greedy(num_tokens: int) -> dict[str, Any]:
    """Return sampling parameters for exactly ``num_tokens`` greedy tokens."""
    return {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
