"""Weight updates of an engine with FP8 weights: it then serves the bits of a start with the new ones."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from segue.distributed.info import TPInfo
from segue.messages.weight_operations import CheckWeights, GetWeights
from segue.messages.weight_update import Commit, Inspect, Load, Take
from segue.models import config
from tests.checkpoint import tiny_fp8
from tests.weight_update.test_inspect import inspect_ranks
from tests.weight_update.test_rank import assert_same
from tests.weight_update.updating import Rank, State, Trainer, manifest_of, rank_of, transfer

FP8 = torch.float8_e4m3fn
K, OUT = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "ko")


@pytest.fixture(scope="module")
def models() -> list[Any]:
    return tiny_fp8.two_models("qwen3", mean=0.3)


@pytest.fixture(scope="module")
def paths(models: list[Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Both models in each layout, and in float32."""
    return tiny_fp8.write_each(models, tmp_path_factory.mktemp("models"), tiny_fp8.LAYOUTS)


@pytest.fixture(autouse=True)
def scales_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantize these small models as larger ones are."""
    monkeypatch.setattr(config, "_SMALL", 0)


@pytest.fixture
def rank(paths: dict[str, list[Path]]) -> Iterator[Rank]:
    with rank_of(paths["float32"][0], quantization="fp8") as rank:
        yield rank


def assert_quantized(rank: Rank, path: Path) -> None:
    assert_same(rank, path, "fp8")


@pytest.mark.parametrize(("size", "small"), [(1, 0), (2, 0), (2, 1024)])
def test_a_trainer_sends_bfloat16_and_each_rank_quantizes(
    size: int, small: int, paths: dict[str, list[Path]], models: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "_SMALL", small)
    old, new = paths["float32"]
    states = [{name: each.detach() for name, each in model.state_dict().items()} for model in models]
    states[1] = {name: each.bfloat16() for name, each in states[1].items()}
    first = rank_of(old, TPInfo(0, size), quantization="fp8")
    last = rank_of(old, TPInfo(size - 1, size), quantization="fp8")
    with first as one, last as other:
        ranks = [one, other][:size]
        trainer = Trainer(ranks)
        for session, (path, state, flattened) in enumerate(
            ((new, states[1], True), (old, states[0], False)), 1
        ):
            before = [rank.served.arena.checksum() for rank in ranks]
            for received in transfer(ranks, trainer, state, manifest_of(state, flattened=flattened), session):
                assert received.error is None
            assert [rank.served.arena.checksum() for rank in ranks] == before
            for rank in ranks:
                assert rank.do(Commit, session=session)["touched"]
                assert_quantized(rank, path)


@pytest.mark.parametrize("copy", [False, True])
def test_a_payload_is_quantized_before_its_commit(
    copy: bool, rank: Rank, paths: dict[str, list[Path]], models: list[Any]
) -> None:
    before = rank.served.arena.checksum()
    rank.do(Take, session=1, payload=save(models[1].state_dict()), copy=copy)
    assert rank.served.arena.checksum() == before
    rank.do(Commit, session=1)
    assert_quantized(rank, paths["float32"][1])


def test_a_part_of_a_fused_parameter_changes_its_own_rows_alone(rank: Rank, models: list[Any]) -> None:
    arena, (part,) = rank.served.arena, rank.served.weight_map.slices[K]
    before = {name: arena.view(name).clone() for name in arena.layout.table}
    rank.do(Take, session=1, payload=save({K: models[1].state_dict()[K]}), copy=False)
    rank.do(Commit, session=1)
    changed = {name for name, values in before.items() if not torch.equal(arena.view(name), values)}
    assert changed == {"layers.0.attn.qkv.weight", "layers.0.attn.qkv.scale"}
    for name in changed:
        differ = (arena.view(name) != before[name]).any(1)
        assert differ.nonzero().flatten().tolist() == list(range(*part.destination[0].indices(10**6)))


@pytest.mark.parametrize("layout", ["float32", *tiny_fp8.LAYOUTS])
@pytest.mark.parametrize("engine", ["fp8", "blocks"])
def test_a_checkpoint_on_disk(layout: str, engine: str, paths: dict[str, list[Path]]) -> None:
    """In any layout, except that an engine with scales per row has no place for those of blocks."""
    old = paths["float32" if engine == "fp8" else engine][0]
    with rank_of(old, TPInfo(1, 2), quantization="fp8") as rank:
        before = rank.served.arena.checksum()
        reply = rank.ask(Load, session=1, model_path=str(paths[layout][1]), load_format=None)
        if (engine, layout) == ("fp8", "blocks"):
            assert "has shape [2, 4] and type F32; here a scale" in reply.errors[0]
            assert rank.served.arena.checksum() == before
            return
        assert reply.errors == []
        rank.do(Commit, session=1)
        if engine == "fp8" or layout == engine:
            assert_quantized(rank, paths[layout][1])
        else:
            assert rank.served.arena.checksum() != before


def fp8_state(path: Path) -> State:
    return {k: v for k, v in load_file(path / "model.safetensors").items() if "input_scale" not in k}


@pytest.mark.parametrize("layout", tiny_fp8.LAYOUTS)
def test_a_trainer_may_send_fp8_with_its_scales(layout: str, paths: dict[str, list[Path]]) -> None:
    old, new = paths[layout]
    state = fp8_state(new)
    with rank_of(old, TPInfo(0, 2)) as one, rank_of(old, TPInfo(1, 2)) as other:
        transfer([one, other], Trainer([one, other]), state, manifest_of(state, flattened=True))
        for rank in (one, other):
            rank.do(Commit, session=1)
            assert_same(rank, new)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop(OUT + "_scale"), "its scale is missing: send it in the same manifest, as"),
        (lambda s: s.pop(OUT), "is the scale of 'model.layers.0.self_attn.o_proj.weight', which is not"),
        (lambda s: s.update({OUT + "_scale": torch.ones(2, 2)}), "has shape [2, 2]; in this engine a scale"),
        (lambda s: s.update({OUT + "_scale": s[OUT + "_scale"].int()}), "has dtype int32; scales must"),
        (lambda s: s.update({"model.norm.weight": torch.ones(192).to(FP8)}), "has dtype float8_e4m3fn; w"),
    ],
)  # fmt: skip
def test_fp8_without_its_scales_is_refused(
    change: Callable[[State], object], message: str, rank: Rank, paths: dict[str, list[Path]]
) -> None:
    state = fp8_state(paths["rows"][1])
    change(state)
    (error,) = rank.ask(Take, session=1, payload=save(state), copy=False).errors
    assert message in error


@pytest.mark.parametrize(
    "tensors",
    [
        {K: torch.full((64, 192), float("nan"))},
        {K: torch.eye(64, 192) * float("inf")},
        {K: torch.full((64, 192), float("nan")).to(FP8), K + "_scale": torch.ones(64, 1)},
        {K: torch.ones(64, 192).to(FP8), K + "_scale": torch.tensor(float("inf"))},
    ],
)
@pytest.mark.parametrize("copy", [False, True])
def test_values_that_are_not_finite_are_refused(tensors: dict[str, Tensor], copy: bool, rank: Rank) -> None:
    reply = rank.ask(Take, session=1, payload=save(tensors), copy=copy)
    assert reply.errors == [f"'{K}' has values that are not finite in bfloat16"]


def test_an_engine_without_fp8_says_what_it_takes(paths: dict[str, list[Path]]) -> None:
    state = {name: tensor for name, tensor in fp8_state(paths["rows"][1]).items() if "_scale" not in name}
    with rank_of(paths["float32"][0]) as rank:
        errors = rank.ask(Take, session=1, payload=save(state), copy=False).errors
        assert "has dtype float8_e4m3fn; weights must have one of float64, float32" in errors[0]


def test_inspection_shows_values_and_checksums_that_ranks_share(
    paths: dict[str, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for layout, small in (("float32", 0), ("float32", 1024), ("blocks", 0)):
        monkeypatch.setattr(config, "_SMALL", small)
        path = paths[layout][0]
        with (
            rank_of(path, quantization="fp8") as rank,
            rank_of(path, TPInfo(0, 2), quantization="fp8") as one,
            rank_of(path, TPInfo(1, 2), quantization="fp8") as other,
        ):
            request = CheckWeights(action="checksum")
            found = inspect_ranks([rank], request)
            assert inspect_ranks([one, other], request) == found
            (part,) = rank.served.weight_map.slices[OUT]
            values = torch.tensor(inspect_ranks([one, other], GetWeights(name=OUT, truncate_size=1000)))
            assert torch.equal(values, rank.served.destination(part).read())
            rank.do(Inspect, request=CheckWeights(action="snapshot"))
            assert rank.do(Inspect, request=CheckWeights(action="compare"))["differ"] == []
            rank.served.arena.view("layers.0.attn.o.scale")[5, 0] *= 1 + 2**-20
            assert rank.do(Inspect, request=CheckWeights(action="compare"))["differ"] == [OUT]
            changed = inspect_ranks([rank], request)["checksums"]
            assert [name for name, value in found["checksums"].items() if changed[name] != value] == [OUT]


def test_a_reset_loses_scales_too_and_all_tensors_bring_them_back(rank: Rank, models: list[Any]) -> None:
    saved = [slab.clone() for slab in rank.served.arena.slabs]
    rank.do(Inspect, request=CheckWeights(action="reset_tensors"))
    assert rank.served.arena.view("layers.0.attn.o.scale").isnan().all()
    rank.do(Take, session=1, payload=save(models[0].state_dict()), copy=False)
    assert "num_missing" not in rank.do(Commit, session=1)
    assert all(torch.equal(a, b) for a, b in zip(rank.served.arena.slabs, saved, strict=True))
