import pytest
import torch

from tests.models.reference import Batch, hf_model, our_model

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
