"""Runs the pinned offline workload, which is the same for every engine.

The models have the shapes of published ones and dummy weights, the prompts are token ids drawn with seed 0,
and EOS is ignored. Each line of output that begins with RESULT is one figure.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Generate = Callable[[list[list[int]], list[int], float], list[int]]
"""(prompts, output tokens per prompt, temperature) -> output tokens made per prompt; all requests at once."""

MAX_ID = 10_000
COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_act": "silu",
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "use_sliding_window": False,
    "initializer_range": 0.02,
}
SHAPES: dict[str, dict[str, Any]] = {  # of Qwen3, unless the name says otherwise
    "0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
        "tie_word_embeddings": False,
    },
    "4b": {
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 9728,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "tie_word_embeddings": False,
    },
    "30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
    },
}
BATCHES, DECODED = (1, 32, 256), 256
FIRST_TOKENS = (16, 64, 256, 1024, 3500)


def model_dir(size: str) -> str:
    """Write the configuration of a model of `size` to a directory, for engines with dummy weights."""
    name = size if size.startswith("llama") else f"qwen3-{size}"
    path = Path(tempfile.gettempdir()) / f"segue-bench-{os.getuid()}" / name
    path.mkdir(parents=True, exist_ok=True)
    config = COMMON | SHAPES[size]
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    return str(path)


def draw_prompt(rng: random.Random, length: int) -> list[int]:
    """Draw `length` token ids."""
    return [rng.randint(0, MAX_ID) for _ in range(length)]


def offline256(rng: random.Random) -> tuple[list[list[int]], list[int]]:
    """Draw the prompts of 256 requests, and their numbers of output tokens."""
    prompts = [draw_prompt(rng, rng.randint(100, 1024)) for _ in range(256)]
    return prompts, [rng.randint(100, 1024) for _ in range(256)]


def run(engine: str, size: str, generate: Generate) -> None:
    """Run the whole workload on one engine and print its figures."""
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        return draw_prompt(rng, length)

    def seconds(prompts: list[list[int]], tokens: Sequence[int], temperature: float = 0.0) -> float:
        """Return the seconds that the engine takes for these requests, after checking its token counts."""
        begun = time.perf_counter()
        made = generate(prompts, list(tokens), temperature)
        elapsed = time.perf_counter() - begun
        if list(made) != list(tokens):
            raise RuntimeError(f"{engine} made {made} tokens where {list(tokens)} were asked for")
        return elapsed

    def figure(name: str, **values: str) -> None:
        text = " ".join(f"{key}={value}" for key, value in values.items())
        print(f"RESULT {engine} {size} {name} {text}", flush=True)

    mixed, outputs = offline256(rng)
    seconds(mixed[:8], [16] * 8, 0.6)  # warm up
    seconds(mixed, [4] * 256, 0.6)
    gc.collect()
    gc.freeze()  # looking through all modules takes 0.1 s, which would be a third of a call
    for _ in range(3):
        took = seconds(mixed, outputs, 0.6)
        figure("offline256", output_tok_per_s=f"{sum(outputs) / took:.0f}", seconds=f"{took:.2f}")
    for rows in BATCHES:
        firsts, wholes = [], []
        for _ in range(3):
            firsts.append(seconds([prompt(512) for _ in range(rows)], [1] * rows) * 1e3)
            wholes.append(seconds([prompt(512) for _ in range(rows)], [1 + DECODED] * rows) * 1e3)
        # Of the least of each: a disturbance of one prefill alone would make the steps seem faster.
        step = (min(wholes) - min(firsts)) / DECODED
        figure(f"decode bs={rows}", step_ms=f"{step:.3f}", prefill512_ms=f"{min(firsts):.1f}")
    for length in FIRST_TOKENS:
        took = statistics.median([seconds([prompt(length)], [1]) for _ in range(15)])
        figure(f"first_token prompt={length}", median_ms=f"{took * 1e3:.2f}")
    took = min(seconds([prompt(2048) for _ in range(64)], [1] * 64) for _ in range(3))
    figure("prefill 64x2048", tok_per_s=f"{64 * 2048 / took:.0f}")
