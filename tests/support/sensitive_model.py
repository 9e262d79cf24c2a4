"""A small model with the bundled model's tokenizer, whose greedy tokens depend on its whole context.

Tests that compare a reply with an uninterrupted one need such a model: with dummy weights, a token hardly
depends on the KV of those before the last. A token of this model takes a tenth of what SmolLM2's takes.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from segue.checkpoint.source import TOKENIZER_FILES, resolve
from segue.config import EngineConfig

NUM_LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 3, 6, 3, 16, 192
HIDDEN = HEADS * HEAD_DIM
NUM_WORDS = 512  # of the vocabulary; the model says only these
QK_GAIN, VALUE_GAIN = (
    2.0,
    2.0,
)  # attention looks at few tokens, and what it finds there weighs more than the token


def write_sensitive_model(directory: Path) -> Path:
    """Write the model's files to a new directory. They are the same each time."""
    source = resolve(None, "auto", EngineConfig().cache_dir).directory
    directory.mkdir(parents=True)
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json", *TOKENIZER_FILES):
        if (source / name).exists():
            shutil.copy(source / name, directory)
    config = json.loads((source / "config.json").read_text())
    config |= {
        "num_hidden_layers": NUM_LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config))
    vocabulary = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    words = sorted(id for text, id in vocabulary.items() if re.fullmatch("Ġ[a-z]{3,}", text))[:NUM_WORDS]
    save_file(_weights(config["vocab_size"], words), directory / "model.safetensors")
    return directory


def _weights(vocab_size: int, words: list[int]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)

    head = torch.zeros(vocab_size, HIDDEN)
    head[words] = matrix(len(words), HIDDEN, gain=4.0)
    found = {
        "model.embed_tokens.weight": torch.randn(vocab_size, HIDDEN, generator=generator),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": head,
    }
    for layer in range(NUM_LAYERS):
        name = f"model.layers.{layer}"
        found |= {
            f"{name}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{name}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{name}.self_attn.q_proj.weight": matrix(HIDDEN, HIDDEN, QK_GAIN),
            f"{name}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, QK_GAIN),
            f"{name}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN, VALUE_GAIN),
            f"{name}.self_attn.o_proj.weight": matrix(HIDDEN, HIDDEN, VALUE_GAIN),
            f"{name}.mlp.gate_proj.weight": matrix(MLP, HIDDEN),
            f"{name}.mlp.up_proj.weight": matrix(MLP, HIDDEN),
            f"{name}.mlp.down_proj.weight": matrix(HIDDEN, MLP),
        }
    return found
