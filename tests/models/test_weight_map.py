from dataclasses import replace

import pytest
import torch

from segue.distributed.info import TPInfo
from segue.errors import TensorParallelError
from segue.models import weight_map
from segue.models.config import ModelConfig
from segue.models.decoder import build_model
from segue.models.weight_map import Coverage, WeightMap
from tests.checkpoint import tiny

SIZES = {"llama": 2, "llama-biases": 2, "llama-tied": 2, "mistral": 2, "qwen2": 2, "qwen3": 4, "qwen3-moe": 8}
RANKS = [(kind, TPInfo(rank, size)) for kind, size in SIZES.items() for rank in range(size)]


def config(kind: str, **options: object) -> ModelConfig:
    with torch.device("meta"):
        return tiny.config_of(tiny.make(kind, **options))


EXACT = Coverage(missing={}, repeated={})


def table(kind: str, tp: TPInfo | None = None, **options: object) -> WeightMap:
    return weight_map.build(config(kind, **options), tp or TPInfo())


def rows_of(names: WeightMap, name: str) -> list[tuple[int, int]]:
    return [(part.source[0].start, part.source[0].stop) for part in names.slices[name]]


@pytest.mark.parametrize("kind", tiny.MODELS)
def test_every_element_is_written_once_on_a_single_rank(kind: str) -> None:
    assert table(kind).coverage() == EXACT


@pytest.mark.parametrize(("kind", "tp"), RANKS)
def test_every_element_is_written_once_on_every_rank(kind: str, tp: TPInfo) -> None:
    assert table(kind, tp).coverage() == EXACT


@pytest.mark.parametrize(("kind", "tp"), RANKS)
def test_parameters_are_those_of_the_model(kind: str, tp: TPInfo) -> None:
    model = build_model(config(kind), dtype=torch.float32, collectives=tiny.Rank(tp))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert table(kind, tp).parameters == shapes


@pytest.mark.parametrize("kind", tiny.MODELS)
def test_shapes_are_those_of_the_checkpoint(kind: str) -> None:
    with torch.device("meta"):
        model = tiny.make(kind)
    names = table(kind)
    state = {
        name: tuple(weight.shape) for name, weight in model.state_dict().items() if name not in names.aliases
    }
    assert {name: names.shapes[name] for name in state} == state


def test_each_projection_is_a_slice_of_the_fused_parameter() -> None:
    names = table("qwen2")
    parts = [names.slices[f"model.layers.0.self_attn.{p}_proj.weight"][0] for p in "qkv"]
    assert [part.parameter for part in parts] == ["layers.0.attn.qkv.weight"] * 3
    assert [(part.destination[0].start, part.destination[0].stop) for part in parts] == [
        (0, 48),
        (48, 64),
        (64, 80),
    ]


def test_with_more_ranks_than_kv_heads_neighbouring_ranks_hold_the_same_head() -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    rows = [rows_of(table("qwen3", TPInfo(rank, 4)), name) for rank in range(4)]
    assert rows == [[(0, 8)], [(0, 8)], [(8, 16)], [(8, 16)]]


def test_the_vocabulary_is_padded_on_the_last_rank() -> None:
    names = table("llama", TPInfo(1, 2))  # 131 tokens
    assert rows_of(names, "lm_head.weight") == [(128, 131)]
    assert names.padding["lm_head.weight"][0] == slice(3, 128)


def test_a_rank_may_hold_nothing_but_padding() -> None:
    names = table("qwen3", TPInfo(3, 4), vocab_size=5)
    assert rows_of(names, "lm_head.weight") == []
    assert names.padding["lm_head.weight"][0] == slice(0, 128)
    assert names.coverage() == EXACT


def test_a_tied_head_is_an_alias_and_may_be_absent() -> None:
    names = table("llama-tied")
    assert names.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in names.names
    assert not names.missing(names.names)


def test_stacked_experts_replace_the_tensors_of_single_experts() -> None:
    names = table("qwen3-moe", TPInfo(1, 2))
    stacked = [name for name in names.names if ".experts." not in name] + list(names.stacked)
    assert not names.missing(stacked)
    assert names.coverage(stacked) == EXACT


def test_a_missing_expert_is_reported_by_name() -> None:
    names = table("qwen3-moe")
    lost = "model.layers.0.mlp.experts.1.up_proj.weight"
    assert names.missing([name for name in names.names if name != lost]) == [lost]


def test_coverage_counts_elements_that_are_not_written() -> None:
    names = table("llama")
    found = names.coverage(name for name in names.names if "layers.2.self_attn.v_proj" not in name)
    assert found.missing == {"layers.2.attn.qkv.weight": 16 * 48}
    assert found != EXACT


def test_coverage_counts_elements_that_are_written_twice() -> None:
    names = table("qwen3-moe")
    found = names.coverage([*names.names, "model.layers.0.mlp.experts.down_proj"])
    assert found.repeated == {"layers.0.mlp.experts.down": 3 * 48 * 24}


def test_coverage_detects_slices_that_overlap() -> None:
    names = table("llama")
    parts = dict(names.slices)
    name = "model.layers.0.mlp.up_proj.weight"
    (part,) = parts[name]
    moved = (slice(79, 159), part.destination[1])
    parts[name] = (weight_map.Slice(part.parameter, moved, part.source),)
    found = replace(names, slices=parts).coverage()
    assert found.repeated == {"layers.0.mlp.gate_up.weight": 48}
    assert found.missing == {"layers.0.mlp.gate_up.weight": 48}


def test_a_size_that_does_not_divide_the_heads_is_an_error() -> None:
    with pytest.raises(TensorParallelError, match="num_attention_heads 6"):
        table("llama", TPInfo(0, 4))


def test_the_slices_of_all_ranks_cover_the_whole_tensor() -> None:
    name = "model.layers.0.mlp.experts.2.down_proj.weight"
    columns = [table("qwen3-moe", TPInfo(rank, 8)).slices[name][0].source[1] for rank in range(8)]
    assert [c.start for c in columns] == [3 * rank for rank in range(8)]
    assert columns[-1].stop == 24
