"""Converts a GGUF file's metadata to the content of `config.json` and `generation_config.json`."""

from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from segue.checkpoint.gguf.file import GGUFFile, GGUFTensor
from segue.checkpoint.model_files import open_file, read_at
from segue.errors import ModelFileError, UnsupportedModelError

ARCHITECTURES = {  # name in GGUF -> model type, class
    "llama": ("llama", "LlamaForCausalLM"),  # Mistral and SmolLM2 too
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
}

_MAX_FACTORS = 1 << 16  # limit of RoPE factors; a model has half as many as a head has values

_TOKEN_IDS = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "unk_token_id": "unknown_token_id",
    "pad_token_id": "padding_token_id",
}


def config(file: GGUFFile) -> dict[str, Any]:
    """Return the content of this model's `config.json`.

    Raises:
        UnsupportedModelError: the architecture, or its kind of RoPE scaling, is not supported.
        ModelFileError: a metadata key is missing.
    """
    name = file.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"model file {file.path} has architecture {name!r}; supported in GGUF files: "
            f"{', '.join(ARCHITECTURES)}"
        )
    reader = Keys(file, name)
    if name == "llama" and reader.get("expert_count"):
        raise UnsupportedModelError(
            f"model file {file.path} is a Llama mixture of experts (Mixtral); supported in GGUF files: "
            f"{', '.join(ARCHITECTURES)} without experts, qwen3moe with them"
        )
    vocab_size = reader.get("vocab_size", len(file.metadata.get("tokenizer.ggml.tokens", ())))
    if not vocab_size:
        raise ModelFileError(
            f"model file {file.path} has neither a vocabulary nor its size. Convert it again"
        )
    model_type, architecture = ARCHITECTURES[name]
    heads, hidden = reader.size("attention.head_count"), reader.size("embedding_length")
    found = {
        "_name_or_path": file.path.stem,
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": reader.need("feed_forward_length"),
        "num_hidden_layers": reader.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.get("attention.head_count_kv", heads),
        "max_position_embeddings": reader.need("context_length"),
        "rms_norm_eps": reader.need("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "rope_parameters": _rope(file, reader),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **token_ids(file),
    }
    if name == "llama":
        found["head_dim"] = reader.get("rope.dimension_count", hidden // heads)
    elif "qwen3" in name:
        found["head_dim"] = reader.get("attention.key_length", 128)
    if name == "qwen3moe":
        found["num_experts"] = reader.need("expert_count")
        found["num_experts_per_tok"] = reader.need("expert_used_count")
        found["moe_intermediate_size"] = reader.need("expert_feed_forward_length")
        found["norm_topk_prob"] = True  # not in the file; true of every model of this architecture
    return found


def generation_config(file: GGUFFile) -> dict[str, Any]:
    """Return the content of `generation_config.json`: the special tokens.

    A file may name both an end of the text and an end of a turn; a generation ends at either, so
    `eos_token_id` lists both if they differ.
    """
    found = token_ids(file)
    found.pop("unk_token_id", None)
    ends = [file.metadata.get(f"tokenizer.ggml.{key}") for key in ("eos_token_id", "eot_token_id")]
    distinct = list(dict.fromkeys(end for end in ends if end is not None))
    if len(distinct) > 1:
        found["eos_token_id"] = distinct
    return found


class Keys:
    """The metadata under one prefix: the architecture's name, or "tokenizer.ggml".

    A key's full name in the file is `<prefix>.<key>`; the methods take the part after the prefix.
    """

    def __init__(self, file: GGUFFile, prefix: str) -> None:
        self.file = file
        self.prefix = prefix

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value, or `default` if the file has none."""
        return self.file.metadata.get(f"{self.prefix}.{key}", default)

    def need(self, key: str) -> Any:
        """Return the value; raise a ModelFileError if the file has none."""
        value = self.get(key)
        if value is None:
            raise ModelFileError(
                f"model file {self.file.path} has no metadata key '{self.prefix}.{key}'. Convert it again"
            )
        return value

    def size(self, key: str) -> int:
        """Return the value; raise a ModelFileError unless it is a positive integer."""
        value = self.need(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelFileError(
                f"model file {self.file.path}: metadata key '{self.prefix}.{key}' is {value!r}; it must be a "
                "positive integer. Convert it again"
            )
        return value


def token_ids(file: GGUFFile) -> dict[str, Any]:
    """Return the special tokens in the file, under the names that `config.json` has for them."""
    keys = {name: f"tokenizer.ggml.{gguf_name}" for name, gguf_name in _TOKEN_IDS.items()}
    return {name: file.metadata[key] for name, key in keys.items() if key in file.metadata}


def _rope(file: GGUFFile, reader: Keys) -> dict[str, Any]:
    """Return the model's `rope_parameters`: the base frequency, and the scaling for long contexts.

    The metadata name the scaling, except for Llama 3's: such a file has a tensor of factors instead.
    """
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": reader.get("rope.freq_base", 10000.0)}
    kind = reader.get("rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        return {**found, **_llama3(file, found["rope_theta"])}
    if kind == "none":
        return found
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"model file {file.path} has RoPE scaling {kind!r}; supported in GGUF files: linear, yarn, Llama "
            "3's"
        )
    found |= {"rope_type": kind, "factor": reader.need("rope.scaling.factor")}
    if kind == "yarn":
        found["original_max_position_embeddings"] = reader.need("rope.scaling.original_context_length")
    return found


def _llama3(file: GGUFFile, theta: float) -> dict[str, Any]:
    """Return the parameters of Llama 3's RoPE scaling, which the file does not name.

    The file has only the factors by which the frequencies are divided, and Llama 3's are recognised by their
    values. `theta` is RoPE's base. Other factors raise an UnsupportedModelError.
    """
    tensor = file.tensors["rope_freqs.weight"]
    factors = _factors(file, tensor)
    # The parameters of Llama 3.1 and later; a file has only the factors that follow from them.
    factor, low, high, original = float(factors.max(initial=1.0)), 1.0, 4.0, 8192
    wavelengths = 2 * np.pi * theta ** (np.arange(len(factors)) / len(factors))
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(factors, expected, rtol=1e-3):
        raise UnsupportedModelError(
            f"model file {file.path}: tensor 'rope_freqs.weight' holds RoPE factors other than Llama 3's, "
            "which Segue does not implement"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _factors(file: GGUFFile, tensor: GGUFTensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Read the RoPE factors, one per frequency, after checking that `tensor` is a vector of float32."""
    is_vector = tensor.type is GGMLQuantizationType.F32 and len(tensor.shape) == 1
    if not is_vector or tensor.shape[0] > _MAX_FACTORS:
        raise ModelFileError(
            f"model file {file.path}: tensor {tensor.name!r} has type {tensor.type.name} and shape "
            f"{list(tensor.shape)}; it must be a vector of at most {_MAX_FACTORS} F32 values. Convert "
            "it again"
        )
    factors = np.empty(tensor.shape, np.float32)
    with open_file(file.path) as handle:
        read_at(handle, tensor.start, factors.data.cast("B"), f"tensor {tensor.name!r}")
    return factors
