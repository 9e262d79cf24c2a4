"""Makes tiny checkpoints of transformers models, and their weights as the engine must hold them."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from segue.checkpoint.load import load_weights
from segue.checkpoint.source import ModelSource, resolve
from segue.distributed.collectives import Collectives
from segue.distributed.info import TPInfo
from segue.memory.arena import Arena
from segue.memory.rank_memory import PrivateMemory
from segue.models.config import ModelConfig
from segue.models.decoder import Decoder, build_model
from segue.models.sharding import shard
from tests.models.reference import convert, hf_config, hf_model

EIGHT = {"num_attention_heads": 8, "num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", EIGHT),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {
            **EIGHT,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "mlp_only_layers": [1],
        },
    ),
}


class Rank(Collectives):
    """A rank without communication, which is enough to build its shard of a model."""


def make(kind: str, **options: Any) -> Any:
    """Makes a transformers model with random weights."""
    architecture, own = MODELS[kind]
    return hf_model(architecture, **{**own, **options})


def config_of(model: nn.Module) -> ModelConfig:
    return ModelConfig.from_hf(hf_config(model))


def save(model: Any, directory: Path, **options: Any) -> Path:
    model.save_pretrained(directory, **options)
    return directory


def save_config(model: nn.Module, directory: Path) -> Path:
    """Writes only the config, which is all that dummy weights need."""
    (directory / "config.json").write_text(json.dumps(hf_config(model), default=str))
    return directory


def expected(model: nn.Module, tp: TPInfo, config: ModelConfig | None = None) -> dict[str, Tensor]:
    """Returns the parameters of one rank, computed directly from the transformers weights."""
    config = config or config_of(model)
    return convert(model.state_dict(), config, shard(config, tp))


def load(
    path: Path,
    *,
    tp: TPInfo | None = None,
    dtype: torch.dtype = torch.float32,
    load_format: Any = "auto",
    cache_dir: Path = Path("/nonexistent"),
    quantization: Any = "auto",
    **options: Any,
) -> tuple[Decoder, Arena]:
    """Resolves, builds and loads a model, as the model runner does."""
    source = resolve(str(path), load_format, cache_dir, quantization=quantization)
    return load_source(source, tp=tp, dtype=dtype, **options)


def load_source(
    source: ModelSource, *, tp: TPInfo | None = None, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Decoder, Arena]:
    tp = tp or TPInfo()
    model = build_model(source.config, dtype=dtype, collectives=Rank(tp))
    return model, load_weights(
        model, source.config, source, tp, PrivateMemory(torch.device("cpu")), dtype, **options
    )


def assert_equal(arena: Arena, weights: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
    """Asserts that the arena holds exactly `weights`, cast to `dtype`."""
    assert arena.layout.table.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(arena.view(name), weight.to(dtype)), name
