"""Tiny random checkpoints, and their reference: the same models in transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.model_runner.making import VOCAB

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA = {"num_attention_heads": 8, "num_key_value_heads": 4}
QWEN3 = {"num_attention_heads": 8, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 11, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True}


def save_llama(directory: Path, **sizes: Any) -> Any:
    """Write a Llama with 8 query and 4 KV heads, and return the transformers model."""
    config = transformers.LlamaConfig(**{**SIZES, **LLAMA, **sizes})
    return _save(directory, transformers.LlamaForCausalLM, config)


def save_qwen3(directory: Path) -> Any:
    """Write a Qwen3 with 8 query and 2 KV heads, and return the transformers model."""
    return _save(directory, transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**SIZES, **QWEN3))


def save_qwen3_moe(directory: Path) -> Any:
    """Write a Qwen3 with 11 experts, 3 per token, and return the transformers model."""
    config = transformers.Qwen3MoeConfig(**SIZES, **QWEN3, **EXPERTS)
    return _save(directory, transformers.Qwen3MoeForCausalLM, config)


def _save(directory: Path, model_class: Any, config: Any) -> Any:
    torch.manual_seed(7)
    model = model_class(config).float().eval().requires_grad_(False)
    model.save_pretrained(directory)
    return model


def reference(model: Any, prompt: list[int], count: int) -> list[int]:
    """Return the greedy tokens of `generate` of transformers."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return list(out[0, len(prompt) :].tolist())
