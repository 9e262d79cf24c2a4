"""Writes a tiny checkpoint with finite weights, whose logits are not finite after one token."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.tiny_model import CONFIG, write_model

POISON = 200  # the token after which logits are not finite
_HUGE = 1e20


def write_overflowing_model(directory: Path) -> Path:
    """Writes a model whose last hidden dimension is 0 except for `POISON`, and overflows in the first MLP."""
    write_model(directory)
    vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
    hidden, inner, kv = CONFIG["hidden_size"], CONFIG["intermediate_size"], 32
    assert isinstance(hidden, int) and isinstance(inner, int)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.05

    weights = {
        "model.embed_tokens.weight": normal(vocab_size, hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    weights["model.embed_tokens.weight"][:, -1] = 0
    weights["model.embed_tokens.weight"][POISON, -1] = 1.0
    for layer in range(2):
        parts = {
            "self_attn.q_proj": normal(hidden, hidden),
            "self_attn.k_proj": normal(kv, hidden),
            "self_attn.v_proj": normal(kv, hidden),
            "self_attn.o_proj": normal(hidden, hidden),
            "mlp.gate_proj": normal(inner, hidden),
            "mlp.up_proj": normal(inner, hidden),
            "mlp.down_proj": normal(hidden, inner),
            "input_layernorm": torch.ones(hidden),
            "post_attention_layernorm": torch.ones(hidden),
        }
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            parts[name][-1] = 0
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            parts[name][:, -1] = _HUGE
        weights |= {f"model.layers.{layer}.{name}.weight": part for name, part in parts.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
