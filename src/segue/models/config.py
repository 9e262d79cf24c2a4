"""The model configuration: the fields of a Hugging Face `config.json` that Segue uses, checked."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, cast, get_args

from segue.dtypes import FP8_BLOCK
from segue.errors import ConfigError, UnsupportedModelError

RopeKind = Literal["default", "linear", "llama3", "yarn"]

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: the base frequencies, and how they are scaled for long contexts."""

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0  # the factor that extends the context; all kinds but default
    original_max_position: int = 0  # trained context in tokens; llama3 and yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: scale of cos and sin; None: derived from factor and mscale
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions


# Small models lose more by FP8, and speed hardly depends on their scales: they have finer ones.
_SMALL, _SMALL_BLOCK = 1024, 16  # hidden size from which on a model is not small; weights per scale
_SET_UNLESS_0 = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")  # 0 means the default
_SET_UNLESS_NULL = ("attention_factor", "mscale", "mscale_all_dim")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Mixture of experts: sizes, routing, and the layers that have experts."""

    num_experts: int
    num_experts_per_tok: int
    expert_intermediate_size: int
    norm_topk_prob: bool  # whether the weights of the chosen experts are scaled to sum to 1
    sparse_step: int = 1  # every sparse_step-th layer is sparse
    dense_layers: tuple[int, ...] = ()  # exceptions: layers that are dense


@dataclass(frozen=True, slots=True, kw_only=True)
class FP8Config:
    """The linear layers and experts of the decoder are in FP8 (float8_e4m3fn), with float32 scales."""

    block: int = 0  # consecutive weights of a row that have one scale; 0: all of the row


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder-only model: sizes of the whole model (not of a rank), and features of its family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int  # longest sequence in tokens
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str | None  # the dtype of the checkpoint, such as "bfloat16"
    moe: MoEConfig | None = None
    fp8: FP8Config | None = None  # None: all weights are in the dtype of the engine

    @property
    def quantization(self) -> str | None:
        """How clients are told the format of the linear layers' weights; None: as all others."""
        return None if self.fp8 is None else "fp8"

    def is_sparse(self, layer: int) -> bool:
        """Whether decoder layer `layer` (from 0) has experts instead of one MLP."""
        moe = self.moe
        return moe is not None and layer not in moe.dense_layers and (layer + 1) % moe.sparse_step == 0

    def quantized(self, quantization: Literal["auto", "none", "fp8"]) -> Self:
        """Return the configuration with the format of weights that `--quantization` asks for.

        Raises:
            ConfigError: this model cannot have it.
        """
        if quantization == "none" and self.fp8 is not None:
            raise ConfigError(
                "quantization='none', but the checkpoint is in FP8; leave --quantization out, or use a "
                "bfloat16 version of the model",
                param="quantization",
            )
        if quantization != "fp8" or self.fp8 is not None:
            return self
        return replace(self, fp8=FP8Config(block=_SMALL_BLOCK if self.hidden_size < _SMALL else 0))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "ModelConfig":
        """Read the content of a `config.json`, in the form of transformers 5 or in the older one.

        Raises:
            UnsupportedModelError: the architecture, activation, RoPE kind or quantisation is not supported,
                or a size is missing or wrong.
        """
        architecture = _architecture(config)
        fp8 = _fp8(config["quantization_config"]) if config.get("quantization_config") else None
        activation = config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise UnsupportedModelError(f"activation {activation!r} is not supported; supported: 'silu'")

        num_heads = _size(config, "num_attention_heads")
        hidden_size = _size(config, "hidden_size")
        is_qwen3 = architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
        has_attention_bias = is_qwen3 or architecture == "LlamaForCausalLM"  # the others ignore the field
        attention_bias = has_attention_bias and bool(config.get("attention_bias", False))
        default_head_dim = 128 if architecture == "Qwen3ForCausalLM" else hidden_size // num_heads
        head_dim = _size(config, "head_dim", default_head_dim)
        if head_dim % 2:
            raise UnsupportedModelError(f"head_dim {head_dim} is odd; RoPE rotates pairs, so it must be even")
        num_kv_heads = _size(config, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise UnsupportedModelError(
                f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}; "
                "correct config.json"
            )
        trained_context = _size(config, "max_position_embeddings")
        rope = _rope(config, trained_context)
        dtype = config.get("dtype") or config.get("torch_dtype")
        return cls(
            architecture=architecture,
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_size(config, "intermediate_size"),
            num_layers=_size(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_positive("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
            rope=rope,
            max_position=_max_position(config, architecture, rope, trained_context),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
            o_bias=attention_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and bool(config.get("mlp_bias", False)),
            qk_norm=is_qwen3,
            dtype=None if dtype is None else str(dtype).removeprefix("torch."),
            moe=_moe(config) if architecture == "Qwen3MoeForCausalLM" else None,
            fp8=fp8,
        )


def _fp8(config: Mapping[str, Any]) -> FP8Config | None:
    """Read `quantization_config`: FP8 by its own method, or in the form of compressed-tensors.

    Which layers are in FP8 is not read here: the dtype of each tensor tells. None: only keys and values were
    calibrated.
    """
    method = config.get("quant_method", "unknown")
    if method == "compressed-tensors" and config.get("kv_cache_scheme") and not config.get("config_groups"):
        return None
    if method == "fp8":
        found = [(config.get("fmt", "e4m3"), config.get("weight_block_size"))]
    elif method == "compressed-tensors":
        weights = [dict(group.get("weights") or {}) for group in (config.get("config_groups") or {}).values()]
        found = [(_compressed_format(each), each.get("block_structure")) for each in weights]
    else:
        found = []
    blocks = {None if block is None else tuple(block) for _, block in found}
    is_known = {kind for kind, _ in found} == {"e4m3"} and len(blocks) == 1
    if not is_known or not blocks <= {None, (FP8_BLOCK, FP8_BLOCK)}:
        raise UnsupportedModelError(
            f"the model is quantised ({method!r}: {found}); supported are FP8 weights (e4m3) with a scale "
            f"per tensor, row or block of [{FP8_BLOCK}, {FP8_BLOCK}], float32, float16 and bfloat16 "
            "weights, and GGUF files: use such a version of the model"
        )
    return FP8Config(block=0 if blocks == {None} else FP8_BLOCK)


def _compressed_format(weights: Mapping[str, Any]) -> str:
    """Return "e4m3" for weights that compressed-tensors describes as FP8, else what they are."""
    kind, bits, strategy = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
    is_fp8 = (kind, bits) == ("float", 8) and strategy in ("tensor", "channel", "block")
    return "e4m3" if is_fp8 and weights.get("symmetric", True) else f"{kind}{bits} per {strategy}"


def _architecture(config: Mapping[str, Any]) -> str:
    """Return the first architecture of `config.json` that is supported; a file may name several."""
    names = config.get("architectures") or []
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    found = ", ".join(map(repr, names)) or "none (config.json has no 'architectures')"
    raise UnsupportedModelError(
        f"model architecture {found} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return the positive integer `key`. Without a `default` the key must be there; null counts as absent."""
    value = default if config.get(key) is None else config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModelError(f"config.json: {key} is {value!r}; it must be a positive integer")
    return value


def _positive(name: str, value: Any) -> float:
    """Return `value` as a number, which must be positive and finite; `name` is for the error."""
    number = float(value)
    if not 0.0 < number < math.inf:
        raise UnsupportedModelError(f"config.json: {name} is {value!r}; it must be a positive number")
    return number


def _rope(config: Mapping[str, Any], trained_context: int) -> RopeConfig:
    """Read the RoPE fields, in the newer or the older form of `config.json`, and refuse unsupported ones.

    `trained_context` is `max_position_embeddings`; it stands in where the fields name no original context.
    """
    # transformers 5 has all fields in rope_parameters; older versions have rope_theta beside rope_scaling.
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    if new and old and new != old:
        raise UnsupportedModelError(
            f"config.json has rope_parameters {new} and rope_scaling {old}, which differ; remove one of them"
        )
    fields = dict(new or old or {})
    if any(isinstance(value, Mapping) for value in fields.values()):
        raise UnsupportedModelError(
            f"RoPE parameters that differ by layer ({', '.join(fields)}) are not supported; supported: one "
            "set for all layers"
        )
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if kind not in get_args(RopeKind):
        raise UnsupportedModelError(
            f"RoPE kind {kind!r} is not supported; supported: {', '.join(get_args(RopeKind))}"
        )
    partial = fields.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise UnsupportedModelError(f"partial_rotary_factor {partial} is not supported; supported: 1.0")
    theta = _positive("rope_theta", fields.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if kind == "default":
        return RopeConfig(theta=theta)
    original = int(
        fields.get("original_max_position_embeddings")
        or config.get("original_max_position_embeddings")
        or trained_context
    )
    factor = fields.get("factor") or (trained_context / original if kind == "yarn" else None)
    if factor is None:
        raise UnsupportedModelError(f"config.json: RoPE kind {kind!r} has no 'factor'; it needs one")
    return RopeConfig(
        kind=cast(RopeKind, kind),
        theta=theta,
        factor=_positive("the RoPE factor", factor),
        original_max_position=original,
        truncate=bool(fields.get("truncate", True)),
        **{name: float(fields[name]) for name in _SET_UNLESS_0 if fields.get(name)},
        **{name: float(fields[name]) for name in _SET_UNLESS_NULL if fields.get(name) is not None},
    )


def _max_position(
    config: Mapping[str, Any], architecture: str, rope: RopeConfig, trained_context: int
) -> int:
    """Return the longest sequence, in tokens, that the model is made for and that runs correctly here."""
    max_len = trained_context
    if rope.kind == "yarn":
        max_len = max(max_len, int(rope.original_max_position * rope.factor))
    # Our attention has no sliding window, which makes no difference while the sequence fits into the window.
    window = _sliding_window(config, architecture)
    return max_len if window is None else min(max_len, window)


def _sliding_window(config: Mapping[str, Any], architecture: str) -> int | None:
    """Return the tokens of the sliding window that the model uses in some layer; None: it uses none.

    Each family says in its own way whether the window is used, with the defaults of transformers.
    """
    if architecture == "MistralForCausalLM":
        uses_window = True
    elif architecture == "LlamaForCausalLM" or not config.get("use_sliding_window", False):
        uses_window = False
    elif architecture == "Qwen3MoeForCausalLM":
        uses_window = True
    elif config.get("layer_types") is not None:
        uses_window = "sliding_attention" in config["layer_types"]
    else:
        uses_window = config.get("max_window_layers", 28) < _size(config, "num_hidden_layers")
    if not uses_window or ("sliding_window" in config and config["sliding_window"] is None):
        return None
    return _size(config, "sliding_window", 4096)


def _moe(config: Mapping[str, Any]) -> MoEConfig:
    """Read the fields of the experts, whose number has one of two names."""
    num_experts = _size(config, "num_experts" if "num_experts" in config else "num_local_experts")
    per_token = _size(config, "num_experts_per_tok")
    if per_token > num_experts:
        raise UnsupportedModelError(
            f"config.json: num_experts_per_tok is {per_token}, but there are {num_experts} experts; correct "
            "the one that is wrong"
        )
    return MoEConfig(
        num_experts=num_experts,
        num_experts_per_tok=per_token,
        expert_intermediate_size=_size(config, "moe_intermediate_size"),
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        sparse_step=_size(config, "decoder_sparse_step", 1),
        dense_layers=tuple(config.get("mlp_only_layers") or ()),
    )
