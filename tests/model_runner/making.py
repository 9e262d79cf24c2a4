"""Makes runners of tiny checkpoints. Must not import transformers: worker processes of tests import this."""

from pathlib import Path
from typing import Any

import torch

from segue.checkpoint.source import resolve
from segue.config import EngineConfig
from segue.distributed.info import TPInfo
from segue.model_runner.runner import ModelRunner

VOCAB = 331


def options(directory: Path, **changes: Any) -> dict[str, Any]:
    """Return options of a small engine that computes in float32."""
    return {
        "model": str(directory),
        "dtype": "float32",
        "device": "cpu",
        "page_size": 4,
        "num_kv_tokens": 1024,
        "max_running_requests": 8,
        "chunked_prefill_size": 64,
        **changes,
    }


def make_runner(
    directory: Path, tp: TPInfo | None = None, run_dir: Path = Path("/nonexistent"), **changes: Any
) -> ModelRunner:
    """Return a runner of the checkpoint in `directory`."""
    config = EngineConfig(**options(directory, **changes))
    source = resolve(config.model, config.load_format, config.cache_dir, quantization=config.quantization)
    return ModelRunner(config, source, tp or TPInfo(), run_dir, lambda *_: None)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()
