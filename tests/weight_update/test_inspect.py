from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from segue.distributed.info import TPInfo
from segue.messages.weight_operations import CheckWeights, GetWeights
from segue.messages.weight_update import Commit, Inspect, Take
from segue.weight_update import inspect
from segue.weight_update.control.calls import merge
from tests.checkpoint import tiny
from tests.weight_update.test_rank import checkpoint
from tests.weight_update.updating import Rank, State, rank_of

SIZES = {"llama-tied": 2, "qwen3": 4, "qwen3-moe": 8}


def inspect_ranks(ranks: list[Rank], request: GetWeights | CheckWeights) -> Any:
    found = merge(request, [rank.ask(Inspect, request=request) for rank in ranks])
    found.pop("ranks", None)
    return found.get("values", found)


@pytest.fixture(params=[(kind, size) for kind, most in SIZES.items() for size in (1, most)], ids=str)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[list[Rank], State]]:
    """All ranks of an engine, in some cases more than its KV heads, and its weights."""
    kind, size = request.param
    path, state = checkpoint(kind, tmp_path / "old", 0)
    with torch.no_grad():
        opened = [rank_of(path, TPInfo(number, size)) for number in range(size)]
    ranks = [each.__enter__() for each in opened]
    try:
        yield ranks, state
    finally:
        for each in opened:
            each.__exit__(None, None, None)


def test_tensors_are_found_by_their_checkpoint_names(engine: tuple[list[Rank], State]) -> None:
    ranks, state = engine
    for name, tensor in state.items():
        if tensor.dim() < 3:
            expected = tensor.to(torch.bfloat16).float()
            for size in (0, 3, 10**6):
                values = inspect_ranks(ranks, GetWeights(name=name, truncate_size=size))
                assert torch.equal(torch.tensor(values).reshape(expected[:size].shape), expected[:size]), name


def test_checksums_do_not_depend_on_the_number_of_ranks(
    engine: tuple[list[Rank], State], tmp_path: Path
) -> None:
    ranks, _ = engine
    found = inspect_ranks(ranks, CheckWeights(action="checksum"))
    assert found["checksums"].keys() == set(ranks[0].served.weight_map.names)
    with rank_of(tmp_path / "old") as alone:
        assert inspect_ranks([alone], CheckWeights(action="checksum")) == found


def change(rank: Rank, tensors: State) -> None:
    number = rank.calls + 1  # a new session: the last one gives its memory back after its reply
    rank.do(Take, session=number, payload=save(tensors), copy=False)
    rank.do(Commit, session=number)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"])
def test_one_changed_value_is_seen_in_checksum_and_comparison(name: str, tmp_path: Path) -> None:
    path, state = checkpoint("qwen3", tmp_path / "old", 0)
    with rank_of(path) as rank:
        (error,) = rank.ask(Inspect, request=CheckWeights(action="compare")).errors
        assert "no snapshot" in error
        before = inspect_ranks([rank], CheckWeights(action="checksum"))
        assert inspect_ranks([rank], CheckWeights(action="snapshot")) == {
            "num_bytes": rank.served.arena.num_bytes
        }
        assert inspect_ranks([rank], CheckWeights(action="compare")) == {"differ": []}
        tensor = state[name].clone()
        tensor.view(-1)[5] += 1
        change(rank, {name: tensor})
        after = inspect_ranks([rank], CheckWeights(action="checksum"))
        differ = [key for key, value in after["checksums"].items() if value != before["checksums"][key]]
        assert differ == [name] and after["total"] != before["total"]
        assert inspect_ranks([rank], CheckWeights(action="compare")) == {"differ": [name]}
        change(rank, {name: state[name]})
        assert inspect_ranks([rank], CheckWeights(action="checksum")) == before
        assert inspect_ranks([rank], CheckWeights(action="compare")) == {"differ": []}


@pytest.mark.parametrize("name", ["qwen3", "llama-tied", "qwen3-moe"])
def test_a_reset_leaves_no_value_and_all_tensors_bring_them_back(name: str, tmp_path: Path) -> None:
    path, state = checkpoint(name, tmp_path / "old", 0)
    with rank_of(path) as rank:
        before = inspect_ranks([rank], CheckWeights(action="checksum"))
        inspect_ranks([rank], CheckWeights(action="snapshot"))
        assert rank.ask(Inspect, request=CheckWeights(action="reset_tensors")).errors == []
        arena, names = rank.served.arena, set(rank.served.weight_map.names)
        padding = rank.served.weight_map.padding
        for parameter in arena.layout.table:
            values = arena.view(parameter).clone()
            if parameter in padding:
                assert not values[padding[parameter]].any()
                values[padding[parameter]] = float("nan")
            assert values.isnan().all(), parameter
        assert rank.served.missing == names
        assert set(inspect_ranks([rank], CheckWeights(action="compare"))["differ"]) == names
        first, *others = state
        change(rank, {name: state[name] for name in others})
        left = inspect_ranks([rank], CheckWeights(action="compare"))["differ"]
        assert rank.served.missing and set(left) == rank.served.missing
        change(rank, {first: state[first]})
        assert not rank.served.missing
        assert inspect_ranks([rank], CheckWeights(action="compare")) == {"differ": []}
        assert inspect_ranks([rank], CheckWeights(action="checksum")) == before


def test_swapped_rows_columns_and_tensors_have_other_checksums(tmp_path: Path) -> None:
    path, state = checkpoint("qwen3", tmp_path / "old", 0)
    gate, up = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
    weight = state[gate]
    rows, columns = (weight.index_select(dim, torch.arange(weight.shape[dim]).flip(0)) for dim in (0, 1))
    with rank_of(path) as rank:
        totals = [inspect_ranks([rank], CheckWeights(action="checksum"))["total"]]
        for payload in ({gate: rows}, {gate: columns}, {gate: state[up], up: state[gate]}):
            change(rank, {gate: state[gate], up: state[up]} | payload)
            totals.append(inspect_ranks([rank], CheckWeights(action="checksum"))["total"])
    assert len(set(totals)) == 4


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GetWeights(name="model.nothing"), "'model.nothing' is not a tensor of this model"),
        (
            GetWeights(name="model.layers.0.mlp.experts.down_proj"),
            "ask for one: model.layers.0.mlp.experts.0",
        ),
    ],
)
def test_invalid_requests_are_refused(request_: GetWeights, message: str, tmp_path: Path) -> None:
    with rank_of(checkpoint("qwen3-moe", tmp_path / "old", 0)[0]) as rank:
        (error,) = rank.ask(Inspect, request=request_).errors
        assert message in error


def test_an_answer_has_a_limited_number_of_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.embed_tokens.weight"
    with rank_of(checkpoint("llama-tied", tmp_path / "old", 0)[0]) as rank:
        rows, columns = rank.served.weight_map.shapes[name]
        assert rows > 110
        monkeypatch.setattr(inspect, "_MAX_VALUES", 110 * columns)
        assert len(inspect_ranks([rank], GetWeights(name=name, truncate_size=110))) == 110
        (error,) = rank.ask(Inspect, request=GetWeights(name=name, truncate_size=111)).errors
        assert "truncate_size is 111" in error and f"{110 * columns} values; ask for 110 at most" in error
        monkeypatch.setattr(inspect, "_MAX_VALUES", 1)
        assert len(inspect_ranks([rank], GetWeights(name=name))) == 100


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    with rank_of(checkpoint("llama-tied", tmp_path / "old", 0)[0]) as rank:
        head, embed = (
            inspect_ranks([rank], GetWeights(name=name))
            for name in ("lm_head.weight", "model.embed_tokens.weight")
        )
        assert head == embed and len(head) == min(100, rank.served.config.vocab_size)


def test_the_kinds_tested_here_exist() -> None:
    assert SIZES.keys() <= tiny.MODELS.keys()


def test_an_inspection_is_answered_though_the_steps_have_failed(tmp_path: Path) -> None:
    path, _ = checkpoint("llama", tmp_path / "old", 0)
    with rank_of(path) as rank:
        assert rank.stream.submit(lambda: 1 // 0).exception() is not None
        (error,) = rank.ask(Inspect, request=CheckWeights(action="snapshot")).errors
        assert "ZeroDivisionError" in error
