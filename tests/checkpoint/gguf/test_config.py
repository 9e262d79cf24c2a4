from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig

from segue.checkpoint.gguf import config as gguf_config
from segue.checkpoint.gguf.file import GGUFFile
from segue.errors import ModelFileError, UnsupportedModelError
from segue.models.config import ModelConfig, RopeConfig
from segue.models.rope import inverse_frequencies
from tests.checkpoint import tiny, tiny_gguf

KINDS = ["llama", "llama-tied", "mistral", "qwen2", "qwen3", "qwen3-moe"]

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Returns a function that writes a GGUF file of a tiny model."""

    def make(kind: str = "llama", options: dict[str, Any] | None = None, **how: Any) -> Path:
        sizes = {"vocab_size": tiny_gguf.vocab_size(), "rms_norm_eps": 2e-5, **(options or {})}
        model = tiny.make(
            kind, num_hidden_layers=1, **({} if "moe" not in kind else {"mlp_only_layers": []}), **sizes
        )
        return tiny_gguf.write(tmp_path / "model.gguf", model, **how)

    return make


def config(path: Path) -> dict[str, Any]:
    return gguf_config.config(GGUFFile.read(path))


@pytest.mark.parametrize("kind", KINDS)
def test_config_equals_the_one_that_transformers_reads(kind: str, write: Write) -> None:
    # transformers ignores two fields of the file and takes its defaults: Qwen3's head size, an expert's size.
    path = write(kind, {"head_dim": 128} if kind == "qwen3" else {})
    theirs = AutoConfig.from_pretrained(path.parent, gguf_file=path.name).to_dict()
    if kind == "qwen3-moe":
        theirs["moe_intermediate_size"] = 24
    ours = config(path)
    assert ModelConfig.from_hf(ours) == ModelConfig.from_hf(
        {**theirs, "architectures": ours["architectures"]}
    )
    for key in ("model_type", "bos_token_id", "eos_token_id", "pad_token_id"):
        assert ours.get(key) == theirs.get(key)


@pytest.mark.parametrize("kind", KINDS)
def test_config_equals_that_of_the_original_model(kind: str, write: Write) -> None:
    path = write(kind)
    with torch.device("meta"):
        model = tiny.make(
            kind,
            num_hidden_layers=1,
            vocab_size=tiny_gguf.vocab_size(),
            **({} if "moe" not in kind else {"mlp_only_layers": [], "norm_topk_prob": True}),
        )
    ours, own = ModelConfig.from_hf(config(path)), tiny.config_of(model)
    same = [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
    ]
    same += ["rope", "tie_embeddings", "qkv_bias", "qk_norm", "max_position", "moe"]
    assert {key: getattr(ours, key) for key in same} == {key: getattr(own, key) for key in same}


def test_generation_config_has_the_special_tokens(write: Write) -> None:
    end, user = (tiny_gguf.tokens().index(token) for token in ("<|end|>", "<|user|>"))
    found = gguf_config.generation_config(GGUFFile.read(write()))
    assert found == {"bos_token_id": user, "eos_token_id": end}


def test_the_end_of_turn_token_ends_a_generation_too(write: Write) -> None:
    end = tiny_gguf.tokens().index("<|end|>")
    path = write(extra={"tokenizer.ggml.eot_token_id": 7})
    assert gguf_config.generation_config(GGUFFile.read(path))["eos_token_id"] == [end, 7]


def test_an_unsupported_architecture_lists_the_supported(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        UnsupportedModelError, match=r"architecture 'gemma3'; supported .*: llama, qwen2, qwen3, qwen3moe"
    ):
        config(tmp_path / "a.gguf")


def test_a_llama_mixture_of_experts_is_unsupported(write: Write) -> None:
    with pytest.raises(UnsupportedModelError, match="Mixtral"):
        config(write(extra={"llama.expert_count": 8}))


def test_a_missing_key_is_named(write: Write) -> None:
    path = write()
    path.write_bytes(path.read_bytes().replace(b"llama.block_count", b"llama.block_cOUNT"))
    with pytest.raises(ModelFileError, match=f"{path} has no metadata key 'llama.block_count'"):
        config(path)


def test_a_file_without_vocabulary_and_its_size_is_refused(write: Write) -> None:
    path = write(tokenizer=None, extra={"llama.vocab_size": None})
    with pytest.raises(ModelFileError, match=f"{path} has neither a vocabulary nor its size"):
        config(path)


def test_zero_heads_are_refused(write: Write) -> None:
    path = write()
    key = b"llama.attention.head_count" + (4).to_bytes(4, "little")  # 4: UINT32
    start = path.read_bytes().index(key) + len(key)
    content = path.read_bytes()
    path.write_bytes(content[:start] + bytes(4) + content[start + 4 :])
    with pytest.raises(ModelFileError, match=r"'llama.attention.head_count' is 0; it must be a positive"):
        config(path)


def test_linear_rope_scaling_is_read(write: Write) -> None:
    path = write(extra={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    assert ModelConfig.from_hf(config(path)).rope.kind == "linear"
    assert ModelConfig.from_hf(config(path)).rope.factor == 4.0


def test_yarn_rope_scaling_is_read(write: Write) -> None:
    keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    }
    path = write("qwen2", extra={f"qwen2.{key}": value for key, value in keys.items()})
    rope = ModelConfig.from_hf(config(path)).rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 64)


def test_an_unknown_rope_scaling_is_unsupported(write: Write) -> None:
    with pytest.raises(UnsupportedModelError, match="RoPE scaling 'longrope'"):
        config(write(extra={"llama.rope.scaling.type": "longrope"}))


def rope_factors(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Returns what llama.cpp's converter stores: the unscaled frequencies divided by the scaled ones."""
    plain, _ = inverse_frequencies(RopeConfig(theta=rope.theta), head_dim)
    scaled, _ = inverse_frequencies(rope, head_dim)
    return (plain / scaled).float().numpy()


def test_llama3_rope_scaling_is_recognised_by_its_factors(write: Write) -> None:
    rope = RopeConfig(
        kind="llama3",
        theta=500000.0,
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=8192,
    )
    options = {"head_dim": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    path = write("llama", options, tensors={"rope_freqs.weight": rope_factors(rope, 64)})
    assert ModelConfig.from_hf(config(path)).rope == rope


def test_other_rope_factors_are_unsupported(write: Write) -> None:
    path = write(tensors={"rope_freqs.weight": np.array([1, 2, 3, 4], np.float32)})
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs.weight"):
        config(path)
