"""Weight updates of experts in FP8: one by one or stacked, in any way that an engine takes weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from segue.distributed.info import TPInfo
from segue.messages.weight_operations import CheckWeights, GetWeights
from segue.messages.weight_update import Commit, Inspect, Load, Take
from segue.models import config
from segue.models.decoder import MoE
from tests.checkpoint import tiny_fp8
from tests.weight_update.test_inspect import inspect_ranks
from tests.weight_update.test_rank import assert_same
from tests.weight_update.test_rank_fp8 import fp8_state
from tests.weight_update.updating import Trainer, manifest_of, rank_of, transfer

FP8 = torch.float8_e4m3fn
DOWN = "model.layers.0.mlp.experts.3.down_proj.weight"
RANKS = (TPInfo(0, 2), TPInfo(1, 2))


@pytest.fixture(scope="module")
def models() -> list[Any]:
    return tiny_fp8.two_models("qwen3-moe", mean=0.1)


@pytest.fixture(scope="module")
def paths(models: list[Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Both models in some layouts, and in float32."""
    return tiny_fp8.write_each(models, tmp_path_factory.mktemp("models"), ("blocks", "rows"))


@pytest.fixture(autouse=True)
def scales_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantize these small models as larger ones are."""
    monkeypatch.setattr(config, "_SMALL", 0)


@pytest.mark.parametrize(
    ("form", "small"), [(tiny_fp8.unstacked, 0), (dict, 1024)], ids=["one by one", "stacked"]
)
def test_a_trainer_sends_bfloat16_and_each_rank_quantizes(
    small: int,
    form: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    paths: dict[str, list[Path]],
    models: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(config, "_SMALL", small)
    old, new = paths["float32"]
    state = form({name: each.detach().bfloat16() for name, each in models[1].state_dict().items()})
    with (
        rank_of(old, RANKS[0], quantization="fp8") as one,
        rank_of(old, RANKS[1], quantization="fp8") as other,
    ):
        received = transfer([one, other], Trainer([one, other]), state, manifest_of(state, flattened=True))
        assert [each.error for each in received] == [None, None]
        for rank in (one, other):
            rank.do(Commit, session=1)
            assert_same(rank, new, "fp8")


@pytest.mark.parametrize("copy", [False, True])
def test_a_payload_of_one_layers_experts_changes_these_alone(
    copy: bool, paths: dict[str, list[Path]], models: list[Any]
) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    with rank_of(paths["float32"][0], quantization="fp8") as rank:
        arena = rank.served.arena
        before = {name: arena.view(name).clone() for name in arena.layout.table}
        layer = cast(MoE, rank.model.get_submodule("layers.0.mlp"))
        packed = dict(layer.packed)
        rank.do(Take, session=1, payload=save({name: models[1].state_dict()[name]}), copy=copy)
        assert layer.packed["gate_up"] is packed["gate_up"], "the commit swaps it"
        rank.do(Commit, session=1)
        changed = {name for name, values in before.items() if not torch.equal(arena.view(name), values)}
        assert changed == {"layers.0.mlp.experts.gate_up", "layers.0.mlp.experts.gate_up_scale"}
        assert layer.packed["down"] is packed["down"]
        assert not torch.equal(layer.packed["gate_up"], packed["gate_up"])


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("tp", [TPInfo(), *RANKS], ids=str)
def test_one_matrix_of_one_expert_changes_alone(
    tp: TPInfo, in_fp8: bool, paths: dict[str, list[Path]], models: list[Any]
) -> None:
    old, new = paths["rows"]
    sent = {DOWN: models[1].state_dict()["model.layers.0.mlp.experts.down_proj"][3].bfloat16()}
    if in_fp8:
        sent = {name: each for name, each in fp8_state(new).items() if name.startswith(DOWN)}
        assert len(sent) == 2
    with rank_of(old, tp, quantization="fp8") as rank:
        arena = rank.served.arena
        before = {name: arena.view(name).clone() for name in arena.layout.table}
        layer = cast(MoE, rank.model.get_submodule("layers.0.mlp"))
        packed = {name: values.clone() for name, values in layer.packed.items()}
        rank.do(Take, session=1, payload=save(sent), copy=False)
        rank.do(Commit, session=1)
        changed = {name for name, values in before.items() if not torch.equal(arena.view(name), values)}
        assert changed == {"layers.0.mlp.experts.down", "layers.0.mlp.experts.down_scale"}
        assert torch.equal(layer.packed["gate_up"], packed["gate_up"])
        others = [0, 1, 2, 4]
        now = [(arena.view(name), before[name]) for name in changed]
        for found, values in (*now, (layer.packed["down"], packed["down"])):
            assert torch.equal(found[others], values[others])
        assert not torch.equal(layer.packed["down"][3], packed["down"][3])
        if in_fp8:
            (part,) = rank.served.weight_map.slices[DOWN]
            meant = (sent[DOWN].float() * sent[DOWN + "_scale"])[part.source]
            assert torch.equal(layer.packed["down"][3], meant.bfloat16())


@pytest.mark.parametrize(
    ("engine", "layout"), [("fp8", "float32"), ("fp8", "rows"), ("fp8", "blocks"), ("blocks", "blocks")]
)
def test_a_checkpoint_on_disk(layout: str, engine: str, paths: dict[str, list[Path]]) -> None:
    """In any layout, except that an engine with scales per row has no place for those of blocks."""
    with rank_of(paths["float32" if engine == "fp8" else engine][0], RANKS[1], quantization="fp8") as rank:
        before = rank.served.arena.checksum()
        reply = rank.ask(Load, session=1, model_path=str(paths[layout][1]), load_format=None)
        if (engine, layout) == ("fp8", "blocks"):
            assert "may have the shapes" in reply.errors[0] and rank.served.arena.checksum() == before
            return
        assert reply.errors == []
        rank.do(Commit, session=1)
        assert_same(rank, paths[layout][1], "fp8")
        assert rank.served.arena.checksum() != before


@pytest.mark.parametrize("layout", ["blocks", "rows"])
@pytest.mark.parametrize("form", [dict, tiny_fp8.stacked], ids=["one by one", "stacked"])
def test_a_trainer_may_send_fp8_with_its_scales(
    layout: str,
    form: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    paths: dict[str, list[Path]],
) -> None:
    old, new = paths[layout]
    state = form(fp8_state(new))
    with rank_of(old, RANKS[0]) as one, rank_of(old, RANKS[1]) as other:
        transfer([one, other], Trainer([one, other]), state, manifest_of(state, flattened=True))
        for rank in (one, other):
            rank.do(Commit, session=1)
            assert_same(rank, new)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({DOWN: torch.ones(192, 256).to(FP8)}, "its scale is missing: send it in the same manifest, as"),
        ({DOWN + "_scale": torch.ones(192, 1)}, f"is the scale of '{DOWN}', which is not sent in float8"),
        (
            {DOWN: torch.ones(192, 256).to(FP8), DOWN + "_scale_inv": torch.ones(2, 2)},
            "has shape [2, 2]; in this engine a scale may have [], [1], [1, 1], [192], [192, 1]",
        ),
        ({DOWN: torch.full((192, 256), torch.inf)}, f"'{DOWN}' has values that are not finite in bfloat16"),
        (
            {"model.layers.0.mlp.gate.weight": torch.ones(5, 192).to(FP8)},
            "has dtype float8_e4m3fn; weights must have one of float64",
        ),
    ],
)  # fmt: skip
def test_what_an_engine_cannot_take_is_refused_by_name(
    tensors: dict[str, Tensor], message: str, paths: dict[str, list[Path]]
) -> None:
    with rank_of(paths["float32"][0], quantization="fp8") as rank:
        (error,) = rank.ask(Take, session=1, payload=save(tensors), copy=False).errors
        assert message in error


def test_inspection_shows_values_and_checksums_that_ranks_share(paths: dict[str, list[Path]]) -> None:
    for layout in ("float32", "blocks"):
        path = paths[layout][0]
        with (
            rank_of(path, quantization="fp8") as rank,
            rank_of(path, RANKS[0], quantization="fp8") as one,
            rank_of(path, RANKS[1], quantization="fp8") as other,
        ):
            request = CheckWeights(action="checksum")
            found = inspect_ranks([rank], request)
            assert inspect_ranks([one, other], request) == found
            (part,) = rank.served.weight_map.slices[DOWN]
            values = torch.tensor(inspect_ranks([one, other], GetWeights(name=DOWN, truncate_size=1000)))
            assert torch.equal(values, rank.served.destination(part).read())
            rank.do(Inspect, request=CheckWeights(action="snapshot"))
            rank.served.arena.view("layers.0.mlp.experts.down_scale")[3, 5, 0] *= 1 + 2**-20
            assert rank.do(Inspect, request=CheckWeights(action="compare"))["differ"] == [DOWN]
            changed = inspect_ranks([rank], request)["checksums"]
            assert [name for name, value in found["checksums"].items() if changed[name] != value] == [DOWN]
