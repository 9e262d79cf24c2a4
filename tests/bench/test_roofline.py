"""The rooflines equal figures that were computed by hand, on the pinned workload."""

import pytest

from bench import cpu_vs_transformers, roofline, suite
from segue.models.config import ModelConfig

COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
SMALL = ModelConfig.from_hf(
    COMMON
    | dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, intermediate_size=3072)
    | dict(tie_word_embeddings=True)
)
LARGE = ModelConfig.from_hf(
    COMMON
    | dict(hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, intermediate_size=12288)
    | dict(tie_word_embeddings=False)
)
H200 = roofline.Machine()


def milliseconds(model, sequences, num_logits):
    return roofline.total(H200, roofline.step(model, sequences, num_logits)).seconds * 1e3


def test_the_workload_has_the_pinned_number_of_tokens():
    prompts, outputs = roofline.offline256_lengths()
    assert (len(prompts), sum(prompts), sum(outputs)) == (256, 142_827, 133_966)


@pytest.mark.parametrize(("model", "expected"), [(SMALL, 0.287), (LARGE, 3.64)])
def test_one_row_reads_every_weight_once(model, expected):
    assert milliseconds(model, [(1, 1)], 1) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(("model", "expected"), [(SMALL, 0.40), (LARGE, 5.08)])
def test_the_gemms_of_256_rows_are_bound_by_arithmetic(model, expected):
    gemms, _, head = roofline.step(model, [(1, 640)] * 256, 256)
    both = gemms.seconds(H200) + head.seconds(H200)
    assert both * 1e3 == pytest.approx(expected, rel=5e-3)
    assert gemms.flops / H200.flops > gemms.bytes / H200.read


def test_of_experts_those_are_read_that_the_tokens_of_a_step_choose():
    moe = ModelConfig.from_hf(suite.COMMON | suite.SHAPES["30b-a3b"])
    one, all_of_them = (roofline.step(moe, [(1, 640)] * rows, rows)[0] for rows in (1, 256))
    assert one.bytes == one.flops  # two bytes and two operations per weight
    assert one.bytes == pytest.approx(5.5e9, rel=2e-2)
    assert all_of_them.bytes == pytest.approx(59.8e9, rel=2e-2)
    assert all_of_them.flops == 256 * one.flops
    assert milliseconds(moe, [(1, 640)], 1) == pytest.approx(1.48, rel=1e-2)
    assert milliseconds(moe, [(1, 640)] * 256, 256) == pytest.approx(18.5, rel=1e-2)


def test_decode_attention_reads_keys_and_values_once():
    _, attention, _ = roofline.step(SMALL, [(1, 640)] * 256, 256)
    assert attention.bytes == 256 * 640 * 28 * 2 * 8 * 128 * 2
    assert attention.seconds(H200) == attention.bytes / H200.read
    _, half, _ = roofline.step(SMALL, [(1, 640)] * 256, 256, fp8_kv=True)
    assert (2 * half.bytes, half.flops) == (attention.bytes, attention.flops)
    plain, fp8 = (roofline.figures(LARGE, H200, fp8_kv=fp8_kv) for fp8_kv in (False, True))
    for name, share in {"decode bs=256": 0.74, "decode bs=1": 0.99}.items():
        assert fp8[name].seconds / plain[name].seconds == pytest.approx(share, abs=0.01)


def test_a_cpus_figures_are_those_of_the_comparison_with_transformers():
    slow = roofline.Machine(read=40e9, flops=1e12)
    found = roofline.cpu_figures(SMALL, slow)
    assert list(found) == [measure.name for measure in cpu_vs_transformers.MEASURES]
    one, many, prefill = (bound.seconds for bound in found.values())
    gemms, _, head = roofline.step(SMALL, [(1, 1)], 1)
    assert (gemms.bytes + head.bytes) / 40e9 < one < many < 1.5 * one
    assert prefill > 1024 * gemms.flops / 1e12


def test_prefill_attention_counts_the_pairs_that_the_mask_allows():
    _, whole, _ = roofline.step(SMALL, [(5, 5)], 1)
    chunks = [roofline.step(SMALL, [(q, kv)], 1)[1] for q, kv in ((2, 2), (3, 5))]
    assert whole.flops == sum(part.flops for part in chunks) == 4 * 15 * 28 * 16 * 128


@pytest.mark.parametrize(
    ("model", "name", "expected"),
    [
        (LARGE, "first_token prompt=16", 3.7),
        (LARGE, "first_token prompt=1024", 20),  # 21 with the head computed for every token
        (LARGE, "first_token prompt=3500", 70),
        (SMALL, "prefill 64x2048", 64 * 2048 / 670e3 * 1e3),
        (SMALL, "offline256", 133_966 / 36_200 * 1e3),
        (LARGE, "offline256", 133_966 / 12_700 * 1e3),
    ],
)
def test_figures_are_within_4_percent_of_first_estimates(model, name, expected):
    assert roofline.figures(model, H200)[name].seconds * 1e3 == pytest.approx(expected, rel=0.04)


def test_a_request_that_has_ended_takes_part_in_no_further_step():
    alone = roofline.offline(SMALL, H200, [100], [50])
    beside = roofline.offline(SMALL, H200, [100, 100], [50, 1])
    assert beside.bytes - alone.bytes == 100 * 28 * 2 * 8 * 128 * 2  # its prompt's keys and values, once
    assert alone.seconds > 50 * 0.28e-3
