"""Writes GGUF files of tiny transformers models, as llama.cpp's converter does."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from torch import Tensor, nn

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}

SPECIALS = ["<|end|>", "<|user|>", "<|endoftext|>"]  # transformers adds the last one if it is missing
PLAIN_ADDED = ["<think>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "Ġ Ġ", "1 2", "Ã ©"]
TEMPLATE = "{% for m in messages %}{{ '<|user|>' + m['content'] + '<|end|>' }}{% endfor %}"


def tokens() -> list[str]:
    """Returns a byte-level vocabulary: all bytes, some merges, added tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [chr(0x100 + i) for i in range(256 - len(printable))]
    return [*map(chr, printable), *others, *(m.replace(" ", "") for m in MERGES), *SPECIALS, *PLAIN_ADDED]


def vocab_size() -> int:
    return len(tokens())


def write(
    path: Path,
    model: Any,
    *,
    types: Mapping[str, Type] | Type = Type.F32,
    tokenizer: str | None = "gpt2",
    specials: Sequence[str] = (),
    extra: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Writes `model`; `types` is by GGUF name, such as "blk.0.attn_q.weight", or one type for all matrices.

    `extra` metadata replaces the model's; None leaves a key out.
    """
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    _metadata(writer, config, architecture)
    if tokenizer == "gpt2":
        _byte_level(writer, architecture, specials)
    elif tokenizer == "llama":
        _sentencepiece(writer)
    for key, value in (extra or {}).items():
        writer.kv_data[0].pop(key, None)
        if value is None:
            continue
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, weight in {**_tensors(model, architecture), **(tensors or {})}.items():
        matrix_type = types if isinstance(types, Type) else types.get(name, Type.F32)
        kind = matrix_type if weight.ndim > 1 else Type.F32
        data = weight if kind is Type.F32 else gguf.quants.quantize(weight, kind)
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    writer.add_name("Tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if architecture == "llama":
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_vocab_size(config.vocab_size)
    if architecture.startswith("qwen3"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if architecture == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _byte_level(writer: gguf.GGUFWriter, architecture: str, specials: Sequence[str]) -> None:
    vocabulary = [*tokens(), *specials]
    kinds = {token: 3 for token in [*SPECIALS, *specials]} | {token: 4 for token in PLAIN_ADDED}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe" if architecture == "llama" else "qwen2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([kinds.get(token, 1) for token in vocabulary])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(vocabulary.index("<|user|>"))
    writer.add_eos_token_id(vocabulary.index("<|end|>"))
    writer.add_chat_template(TEMPLATE)


def _sentencepiece(writer: gguf.GGUFWriter) -> None:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁w", "he", "ll", "▁wo", "hell", "hello", *"▁helowrd", "<|im_end|>"]
    special = {"<unk>": 2, "<s>": 3, "</s>": 3, "<|im_end|>": 3}
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces)
    writer.add_token_scores([float(-index) for index in range(len(pieces))])
    writer.add_token_types([special.get(piece, 6 if piece.startswith("<0x") else 1) for piece in pieces])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)


def _tensors(model: nn.Module, architecture: str) -> dict[str, np.ndarray]:
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    config: Any = model.config
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    found: dict[str, np.ndarray] = {}
    for name, weight in model.state_dict().items():
        data: Tensor = weight
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            layer = name.split(".")[2]
            gate, up = data.chunk(2, 1)
            found[f"blk.{layer}.ffn_gate_exps.weight"] = gate.numpy()
            found[f"blk.{layer}.ffn_up_exps.weight"] = up.numpy()
            continue
        if name.endswith("experts.down_proj"):
            found[f"blk.{name.split('.')[2]}.ffn_down_exps.weight"] = data.numpy()
            continue
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            rows, columns = data.shape
            data = data.view(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
        stem, _, kind = name.rpartition(".")
        found[f"{names.get_name(stem)}.{kind}"] = data.numpy()
    return found
