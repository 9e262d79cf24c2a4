from typing import Any

import pytest

from segue.distributed.info import TPInfo
from segue.errors import TensorParallelError, UnsupportedModelError
from segue.models.config import SUPPORTED_ARCHITECTURES, ModelConfig, RopeConfig
from segue.models.sharding import allowed_sizes, shard

SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}

MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 768,
}


def parse(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**SMOLLM2, **changes})


def test_smollm2_is_read() -> None:
    config = parse()
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.rope == RopeConfig(theta=100000.0)
    assert config.dtype == "bfloat16"
    assert config.tie_embeddings


def test_old_and_new_rope_fields_give_the_same_config() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 2048}
    old = parse(rope_theta=5e5, rope_scaling={"type": "yarn", **scaling})
    new = parse(rope_theta=None, rope_parameters={"rope_type": "yarn", "rope_theta": 5e5, **scaling})
    assert old.rope == new.rope
    assert old.rope.theta == 5e5


def test_yarn_lengthens_the_context() -> None:
    scaling = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
    assert parse(rope_scaling=scaling).max_position == 32768


def test_a_sliding_window_limits_the_context_of_mistral() -> None:
    assert parse(architectures=["MistralForCausalLM"], sliding_window=4096).max_position == 4096
    assert parse(architectures=["MistralForCausalLM"], sliding_window=None).max_position == 8192


def test_an_unused_sliding_window_limits_nothing() -> None:
    config = parse(architectures=["Qwen2ForCausalLM"], sliding_window=1024, use_sliding_window=False)
    assert config.max_position == 8192


@pytest.mark.parametrize(("max_window_layers", "max_len"), [(30, 8192), (29, 1024)])
def test_a_sliding_window_on_no_layer_limits_nothing(max_window_layers: int, max_len: int) -> None:
    config = parse(
        architectures=["Qwen2ForCausalLM"],
        sliding_window=1024,
        use_sliding_window=True,
        max_window_layers=max_window_layers,
    )
    assert config.max_position == max_len


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Qwen2ForCausalLM"])
def test_attention_bias_is_ignored_by_architectures_without_the_field(architecture: str) -> None:
    config = parse(architectures=[architecture], attention_bias=True)
    assert (config.qkv_bias, config.o_bias) == (architecture == "Qwen2ForCausalLM", False)


def test_both_rope_fields_may_be_present_if_they_are_equal() -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    assert parse(rope_parameters=rope, rope_scaling=dict(rope)).rope == parse(rope_parameters=rope).rope


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", *SUPPORTED_ARCHITECTURES]),
        ({"architectures": None}, ["none"]),
        ({"hidden_act": "gelu"}, ["gelu", "silu"]),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, ["longrope", "yarn"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["linear", "factor"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["awq"]),
        ({"hidden_size": "big"}, ["hidden_size", "big"]),
        ({"num_key_value_heads": 2}, ["9", "2"]),
        ({"num_key_value_heads": -3}, ["num_key_value_heads", "-3"]),
        ({"rms_norm_eps": -1e-5}, ["rms_norm_eps", "-1e-05"]),
        ({"rope_theta": -5}, ["rope_theta", "-5"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, ["factor", "nan"]),
        ({"head_dim": "64"}, ["head_dim", "'64'"]),
        ({"head_dim": 63}, ["head_dim", "63", "even"]),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, ["sliding_window", "0"]),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            },
            ["rope_parameters", "rope_scaling", "yarn"],
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["full_attention", "by layer"]),
        ({**MOE, "decoder_sparse_step": 0}, ["decoder_sparse_step", "0"]),
        ({**MOE, "num_experts_per_tok": 9}, ["num_experts_per_tok", "9", "8 experts"]),
    ],
)
def test_the_error_names_what_is_not_supported(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        parse(**changes)
    assert all(word in error.value.message for word in words)


def test_smollm2_is_sharded_over_three_ranks() -> None:
    sizes = shard(parse(), TPInfo(2, 3))
    assert (sizes.num_heads, sizes.head_start, sizes.num_kv_heads, sizes.kv_head_start) == (3, 6, 1, 2)
    assert (sizes.intermediate_size, sizes.vocab_size, sizes.vocab_start) == (512, 16384, 32768)


def test_the_error_for_a_tensor_parallel_size_names_the_heads_and_the_sizes_that_fit() -> None:
    with pytest.raises(TensorParallelError) as error:
        shard(parse(), TPInfo(0, 2))
    assert all(word in error.value.message for word in ("size 2", "9", "3", "1, 3"))


def test_key_value_heads_are_replicated_over_more_ranks() -> None:
    config = parse(num_attention_heads=8, num_key_value_heads=2)
    assert [shard(config, TPInfo(rank, 4)).kv_head_start for rank in range(4)] == [0, 0, 1, 1]
    assert shard(config, TPInfo(0, 4)).num_kv_heads == 1
    assert allowed_sizes(config) == [1, 2, 4, 8]


def test_the_vocabulary_is_padded_to_the_ranks() -> None:
    sizes = shard(parse(vocab_size=700), TPInfo(1, 3))  # each rank has whole blocks of 128
    assert (sizes.vocab_size, sizes.vocab_start, sizes.vocab_size * sizes.tp.size) == (256, 256, 768)
