import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from segue.distributed.info import TPInfo
from segue.layers.moe_backend import run_by_expert
from segue.models.config import ModelConfig
from segue.models.decoder import MLP, MoE, build_model
from segue.models.sharding import shard as shard_of
from tests.layers.filling import OneOfSeveralRanks, check_close, fill
from tests.models.reference import SIZES, Batch, hf_model, our_model

FAMILIES = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-biased": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "smollm-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 100}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
    ),
    "qwen3-moe-normed": (
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
}
ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 500000.0,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    },
    "yarn-scaled": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.3,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
}
PROMPTS = [
    torch.randint(0, 131, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (40, 13, 27)
]


def expected(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0]


def assert_equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_prefill_gives_the_logits_of_transformers(family: str) -> None:
    model = hf_model(FAMILIES[family][0], **FAMILIES[family][1])
    batch = Batch(our_model(model), page_size=16, num_sequences=1)
    assert_equal(batch.step({0: PROMPTS[0]}), expected(model, PROMPTS[0]))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_indices_select_the_same_logits(family: str) -> None:
    model = hf_model(FAMILIES[family][0], **FAMILIES[family][1])
    batch = Batch(our_model(model), page_size=16, num_sequences=2)
    got = batch.step(
        {0: PROMPTS[0], 1: PROMPTS[1]}, logits_indices=[len(PROMPTS[0]) - 1, len(PROMPTS[0]) + 3, 2]
    )
    first, second = (expected(model, ids) for ids in PROMPTS[:2])
    assert_equal(got, torch.stack([first[-1], second[3], first[2]]))


@pytest.mark.parametrize("head_dim", [80, 96])  # on a CPU with kernels of its own, they serve the second one
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_gives_nearly_the_logits_of_transformers(family: str, head_dim: int) -> None:
    options = {**FAMILIES[family][1], "head_dim": head_dim, "initializer_range": 0.05}
    model = hf_model(FAMILIES[family][0], **options).bfloat16().float()
    batch = Batch(our_model(model, dtype=torch.bfloat16), page_size=3, num_sequences=2)
    ids, other = PROMPTS[:2]
    got = [batch.step({0: ids[:7], 1: other})[:7], batch.step({0: ids[7:8], 1: [3]})[:1]]
    got.append(batch.step({1: [5], 0: ids[8:]})[1:])
    torch.testing.assert_close(torch.cat(got), expected(model, ids), atol=0.04, rtol=0)


@pytest.mark.parametrize("rope", ROPES)
def test_rope_scaling_gives_the_logits_of_transformers(rope: str) -> None:
    model = hf_model("LlamaForCausalLM", rope_parameters=ROPES[rope])
    batch = Batch(our_model(model), page_size=16, num_sequences=1, max_len=200)
    ids = (PROMPTS[0] * 5)[:200]
    assert_equal(batch.step({0: ids}), expected(model, ids))


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_decode_in_ragged_steps_give_the_logits_of_transformers(
    family: str, page_size: int
) -> None:
    model = hf_model(FAMILIES[family][0], **FAMILIES[family][1])
    batch = Batch(our_model(model), page_size=page_size, num_sequences=3)
    a, b, c = PROMPTS
    steps = [
        {1: b[:11], 0: a[:7]},
        {1: b[11:12], 2: c[:20], 0: a[7:8]},
        {1: b[12:13], 0: a[8:9], 2: c[20:25]},
        {0: a[9:10], 2: c[25:26]},
        {2: c[26:27], 0: a[10:40]},
    ]
    got: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
    for step in steps:
        logits = batch.step(step)
        assert logits is not None
        for slot, rows in zip(step, logits.split([len(ids) for ids in step.values()]), strict=True):
            got[slot].append(rows)
    for slot, ids in enumerate(PROMPTS):
        assert_equal(torch.cat(got[slot]), expected(model, ids))


def small_config(architecture: str, **sizes: Any) -> ModelConfig:
    """Return the config of a model with hidden states of 6 channels."""
    return ModelConfig.from_hf({"architectures": [architecture], **SIZES, "hidden_size": 6, **sizes})


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_mlp_shards_sum_to_the_gated_mlp(size: int, bias: bool) -> None:
    x, gate, up, down = torch.randn(5, 6), torch.randn(8, 6), torch.randn(8, 6), torch.randn(6, 8)
    biases = [torch.randn(n) if bias else torch.zeros(n) for n in (8, 8, 6)]
    hidden = F.silu(F.linear(x, gate, biases[0])) * F.linear(x, up, biases[1])
    config, parts = small_config("LlamaForCausalLM", intermediate_size=8, mlp_bias=bias), []
    for rank in range(size):

        def shard(weight: Tensor, dim: int = 0, rank: int = rank) -> Tensor:
            return weight.chunk(size, dim)[rank]

        weights = {"gate_up__weight": torch.cat([shard(gate), shard(up)]), "down__weight": shard(down, 1)}
        if bias:
            weights |= {
                "gate_up__bias": torch.cat([shard(biases[0]), shard(biases[1])]),
                "down__bias": biases[2],
            }
        mlp = MLP(config, shard_of(config, TPInfo(rank, size)), OneOfSeveralRanks(rank, size))
        parts.append(fill(mlp, **weights)(x))
    check_close(torch.stack(parts).sum(0), F.linear(hidden, down, biases[2]))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_moe_shards_sum_to_the_weighted_experts(size: int, norm: bool) -> None:
    x, router = torch.randn(5, 6), torch.randn(4, 6)
    gate, up, down = torch.randn(4, 8, 6), torch.randn(4, 8, 6), torch.randn(4, 6, 8)
    weights, chosen = (x @ router.T).softmax(-1).topk(2)
    if norm:
        weights = weights / weights.sum(-1, keepdim=True)
    expected = torch.stack(
        [
            sum(
                w * (down[e] @ (F.silu(gate[e] @ token) * (up[e] @ token)))
                for w, e in zip(ws, es, strict=True)
            )
            for token, ws, es in zip(x, weights, chosen, strict=True)
        ]
    )
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": norm}
    config, parts = small_config("Qwen3MoeForCausalLM", **experts), []
    assert config.moe is not None
    for rank in range(size):
        layer = MoE(config.moe, config.hidden_size, shard_of(config, TPInfo(rank, size)), run_by_expert)
        fill(
            layer,
            router__weight=router,
            experts__gate_up=torch.cat([gate.chunk(size, 1)[rank], up.chunk(size, 1)[rank]], 1),
            experts__down=down.chunk(size, 2)[rank],
        )
        parts.append(layer(x.clone()))
    check_close(torch.stack(parts).sum(0), expected)


def test_a_tied_head_shares_the_weight_of_the_embedding() -> None:
    config = small_config("LlamaForCausalLM", tie_word_embeddings=True)
    model = build_model(config, dtype=torch.bfloat16)
    assert model.lm_head.weight is model.embed.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


@pytest.mark.parametrize("is_tied", [False, True])
def test_only_what_depends_on_changed_weights_is_built_again(is_tied: bool) -> None:
    model = our_model(hf_model("Qwen3ForCausalLM", tie_word_embeddings=is_tied))
    before = {name: getattr(module, "packed", None) for name, module in model.named_modules()}
    model.build_derived(["embed.weight", "layers.1.attn.qkv.weight"])
    built = [
        name for name, module in model.named_modules() if getattr(module, "packed", None) is not before[name]
    ]
    assert built == ["layers.1.attn.qkv", *(["lm_head"] if is_tied else [])]


@pytest.mark.parametrize("size", [1, 2])
def test_the_norms_of_queries_and_keys_are_joined_where_they_were(size: int) -> None:
    """Captured graphs have the addresses. After any change, all layers have their weights."""
    collectives = OneOfSeveralRanks(size - 1, size)
    model = our_model(hf_model("Qwen3ForCausalLM"), collectives, torch.bfloat16)
    addresses = [layer.attn.qk_weight.data_ptr() for layer in model.layers]
    heads, kv_heads = 6 // size, 2 // size
    for changed in (None, ["layers.1.attn.k_norm.weight"], ["embed.weight"]):
        for layer in model.layers:
            layer.attn.q_norm.weight.normal_()
            layer.attn.k_norm.weight.normal_()
        model.build_derived(changed)
        for layer, address in zip(model.layers, addresses, strict=True):
            query, key = layer.attn.q_norm.weight.float(), layer.attn.k_norm.weight.float()
            assert torch.equal(layer.attn.qk_weight, torch.stack([query] * heads + [key] * kv_heads))
            assert layer.attn.qk_weight.data_ptr() == address and layer.attn.qk_weight.is_contiguous()
    assert model.derive_qk_weights() == 3 * (heads + kv_heads) * 8 * 4
    llama = our_model(hf_model("LlamaForCausalLM"))
    assert llama.derive_qk_weights() == 0 and llama.layers[0].attn.qk_weight is None


def test_making_a_decoder_does_not_import_torchs_compiler() -> None:
    """Drawing initial values on the meta device would: 800 modules, and a second of every start."""
    program = """if True:
        import sys, torch
        from segue.models.config import ModelConfig
        from segue.models.decoder import build_model
        config = dict(architectures=["LlamaForCausalLM"], hidden_size=32, intermediate_size=64, vocab_size=64)
        config |= dict(num_hidden_layers=1, num_attention_heads=2, rms_norm_eps=1e-5)
        config |= dict(max_position_embeddings=64, tie_word_embeddings=True)
        build_model(ModelConfig.from_hf(config), dtype=torch.float32)
        print("torch._dynamo" in sys.modules)
    """
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.stdout == "False\n", result.stderr
