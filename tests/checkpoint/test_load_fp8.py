"""FP8 weights: checkpoints in FP8 mean what their scales say, and others are quantized as they are loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from segue.checkpoint import dummy, load, safetensors
from segue.checkpoint.source import resolve
from segue.distributed.info import TPInfo
from segue.errors import ConfigError, ModelFileError, TensorParallelError, UnsupportedModelError
from segue.kernels.fp8 import dequantize, quantize
from segue.memory.arena import Arena
from segue.models import config, weight_map
from segue.models.config import FP8Config, ModelConfig
from segue.models.destination import destination_of
from tests.checkpoint import tiny, tiny_fp8
from tests.models.reference import Batch

FP8 = torch.float8_e4m3fn
TPS = (TPInfo(), TPInfo(0, 2), TPInfo(1, 2))


def read(arena: Arena, model: ModelConfig, tp: TPInfo = TPInfo()) -> dict[str, Tensor]:  # noqa: B008
    """This rank's part of each checkpoint tensor, as float32 values."""
    table = weight_map.build(model, tp)
    return {
        name: destination_of(arena.view, table, part).read().float()
        for name in table.names
        for part in table.slices[name]
    }


def parts(state: dict[str, Tensor], model: ModelConfig, tp: TPInfo) -> dict[str, Tensor]:
    table = weight_map.build(model, tp)
    return {name: state[name][part.source] for name in table.names for part in table.slices[name]}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values.float()), name


@pytest.mark.parametrize("layout", tiny_fp8.LAYOUTS)
@pytest.mark.parametrize("kind", ["llama-biases", "qwen3-moe"])
def test_a_checkpoint_in_fp8_has_the_values_that_its_scales_say(
    layout: str, kind: str, tmp_path: Path
) -> None:
    meant = tiny_fp8.write(tmp_path, layout, tiny_fp8.model(kind))
    source = resolve(str(tmp_path), "auto", tmp_path)
    assert source.config.fp8 == FP8Config(block=128 if layout == "blocks" else 0)
    for tp in TPS:
        _, arena = tiny.load_source(source, tp=tp, dtype=torch.bfloat16)
        assert_same(read(arena, source.config, tp), parts(meant, source.config, tp))


@pytest.mark.parametrize("layout", tiny_fp8.LAYOUTS)
def test_logits_of_a_checkpoint_in_fp8_are_near_those_of_the_model(layout: str, tmp_path: Path) -> None:
    """Within 15 % of their size, and with the values of the checkpoint in float32 within its rounding."""
    model = tiny_fp8.model("qwen3-moe")  # a layer of experts, and one without
    meant = tiny_fp8.write(tmp_path, layout, model)
    tokens = torch.randint(0, 131, (40,), generator=torch.Generator().manual_seed(5)).tolist()
    ours, _ = tiny.load(tmp_path, dtype=torch.float32)
    ours.build_derived()
    found = Batch(ours, 16, 1).step({0: tokens})
    assert found is not None
    with torch.inference_mode():
        original = model(torch.tensor([tokens])).logits[0]
        model.load_state_dict(tiny_fp8.stacked(meant))
        exact = model(torch.tensor([tokens])).logits[0]
    assert (found - exact).norm() / exact.norm() < 1e-4
    assert 0.001 < (found - original).norm() / original.norm() < 0.15


def test_experts_in_fp8_compute_the_bits_of_their_values_in_bfloat16(tmp_path: Path) -> None:
    model = tiny_fp8.model("qwen3-moe")
    meant = tiny_fp8.write(tmp_path / "fp8", "blocks", model)
    model.load_state_dict(tiny_fp8.stacked(meant))
    tiny.save(model, tmp_path / "values")
    found, x = [], torch.randn(40, 192).bfloat16()
    for name in ("fp8", "values"):
        ours, _ = tiny.load(tmp_path / name, dtype=torch.bfloat16)
        ours.build_derived()
        found += [ours.get_submodule("layers.0.mlp")(x[:count]) for count in (1, 40)]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


@pytest.mark.parametrize("kind", ["llama-biases", "qwen3-moe"])
def test_a_model_computes_without_packed_copies(kind: str, tmp_path: Path) -> None:
    """So between the release of its memory and an update of its weights."""
    tiny_fp8.write(tmp_path, "blocks", tiny_fp8.model(kind))
    model, _ = tiny.load(tmp_path, dtype=torch.float32)
    assert model.build_derived() > 0
    expected = Batch(model, 16, 1).step({0: list(range(9))})
    model.drop_packed()
    found = Batch(model, 16, 1).step({0: list(range(9))})
    assert found is not None and expected is not None
    torch.testing.assert_close(found, expected)


@pytest.fixture(scope="module", params=["llama", "qwen3-moe"])
def bfloat16(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny_fp8.model(request.param).bfloat16(), tmp_path_factory.mktemp("bfloat16"))


@pytest.mark.parametrize("block", [0, 16])
def test_weights_are_quantized_as_they_are_loaded(
    block: int, bfloat16: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has slices of the same weights in FP8: scales are those of whole rows, or of short blocks."""
    monkeypatch.setattr(config, "_SMALL", 193 if block else 192)  # the hidden size is 192
    source = resolve(str(bfloat16), "auto", bfloat16, quantization="fp8")
    state = load_file(bfloat16 / "model.safetensors")
    expected = {}
    for name, values in state.items():
        expected[name] = values.float()
        if tiny_fp8.is_linear(name):
            expected[name] = dequantize(*quantize(values, block), block)
    monkeypatch.setattr(load, "BounceBuffers", lambda device, _: safetensors.BounceBuffers(device, 5000))
    for tp in TPS:
        _, arena = tiny.load_source(source, tp=tp, dtype=torch.bfloat16)
        assert arena.view("layers.1.mlp.down.weight").dtype == FP8
        assert arena.view("layers.1.mlp.down.scale").dtype == torch.float32
        assert arena.view("lm_head.weight").dtype == torch.bfloat16
        assert_same(read(arena, source.config, tp), parts(expected, source.config, tp))


def test_dummy_weights_are_the_same_on_every_rank(bfloat16: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dummy, "_BLOCK_ELEMENTS", 5000)
    source = resolve(str(bfloat16), "dummy", bfloat16, quantization="fp8")
    _, arena = tiny.load_source(source, dtype=torch.bfloat16)
    whole = read(arena, source.config)
    for tp in TPS[1:]:
        _, arena = tiny.load_source(source, tp=tp, dtype=torch.bfloat16)
        assert_same(read(arena, source.config, tp), parts(whole, source.config, tp))


def test_tensors_that_the_checkpoint_leaves_in_bfloat16_are_quantized(tmp_path: Path) -> None:
    meant = tiny_fp8.write(tmp_path, "blocks", tiny_fp8.model("llama"))
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    del tensors[name + "_scale_inv"]
    tensors[name] = meant[name].bfloat16()
    save_file(tensors, tmp_path / "model.safetensors")
    model, arena = tiny.load(tmp_path, dtype=torch.bfloat16)
    meant[name] = dequantize(*quantize(tensors[name], 128), 128)
    assert_same(read(arena, model.config), meant)


def change(path: Path, **tensors: Tensor | None) -> None:
    """Replaces tensors of layer 0's o_proj, or leaves them out."""
    state = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        full = f"model.layers.0.self_attn.o_proj.{name}"
        if tensor is None:
            del state[full]
        else:
            state[full] = tensor
    save_file(state, path / "model.safetensors")


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"weight_scale": None}, "o_proj.weight' is in FP8, and .* has no scale of it"),
        ({"weight": torch.zeros(192, 256)}, "is a scale, but there is no .*o_proj.weight' in FP8"),
        ({"weight_scale": torch.ones(2, 2)}, r"shape \[2, 2\] .* shapes \[\], \[1\], \[1, 1\], \[192"),
        ({"weight_scale": torch.ones(192, 1, dtype=torch.int32)}, "type I32; .* the types F64"),
        ({"weight_scale": torch.full((192, 1), float("inf"))}, "o_proj.weight' has .* that are NaN or inf"),
        ({"weight": torch.full((192, 256), float("nan")).to(FP8)}, "o_proj.weight' has 49152 values"),
        ({"strange_scale": torch.ones(1)}, "strange_scale' is not part of the model"),
    ],
)  # fmt: skip
def test_a_wrong_checkpoint_is_refused(tensors: dict[str, Any], expected: str, tmp_path: Path) -> None:
    tiny_fp8.write(tmp_path, "rows", tiny_fp8.model("llama"))
    change(tmp_path, **tensors)
    with pytest.raises(ModelFileError, match=expected):
        tiny.load(tmp_path, dtype=torch.bfloat16)


def test_values_that_are_not_finite_are_found_though_they_are_quantized(tmp_path: Path) -> None:
    model = tiny_fp8.model("llama").bfloat16()
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = float("-inf")
    source = resolve(str(tiny.save(model, tmp_path)), "auto", tmp_path, quantization="fp8")
    with pytest.raises(ModelFileError, match=r"up_proj.weight' has .* NaN or infinite"):
        tiny.load_source(source, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        {"quant_method": "fp8", "fmt": "e5m2"},
        {"quant_method": "compressed-tensors", "config_groups": {}},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"a": {"weights": {"type": "int", "num_bits": 8, "strategy": "channel"}}},
        },
    ],
)
def test_other_quantization_is_refused(quantization: dict[str, Any], tmp_path: Path) -> None:
    tiny.save_config(tiny_fp8.model("llama"), tmp_path)
    whole = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**whole, "quantization_config": quantization}))
    with pytest.raises(UnsupportedModelError, match=r"is quantised .* supported are FP8 weights \(e4m3\)"):
        resolve(str(tmp_path), "auto", tmp_path)


@pytest.mark.parametrize("layout", ["blocks", "rows", "tensors"])
def test_experts_in_fp8_may_be_stacked(layout: str, tmp_path: Path) -> None:
    """As transformers 5 names them, with the scales of all experts in one tensor."""
    meant = tiny_fp8.write(tmp_path, layout, tiny_fp8.model("qwen3-moe"))
    tensors = load_file(tmp_path / "model.safetensors")
    of_weights = {name: each for name, each in tensors.items() if "input_scale" not in name}
    for name in [name for name in of_weights if "gate_proj" in name and "experts" in name]:
        if layout == "tensors":  # both halves of a stacked tensor have one scale
            of_weights[name.replace("gate_proj", "up_proj")] = of_weights[name]
    stacked = tiny_fp8.stacked(of_weights)
    for name in stacked:
        if "gate_up_proj_scale" in name and layout == "tensors":
            stacked[name] = stacked[name][:, :1].contiguous()
    save_file(stacked, tmp_path / "model.safetensors")
    source = resolve(str(tmp_path), "auto", tmp_path)
    if layout == "tensors":
        ups = [name for name in meant if "experts" in name and "up_proj" in name]
        meant |= {name: meant[name.replace("up_proj", "gate_proj")] for name in ups}
    for tp in TPS:
        _, arena = tiny.load_source(source, tp=tp, dtype=torch.bfloat16)
        assert_same(read(arena, source.config, tp), parts(meant, source.config, tp))


def test_routers_stay_as_they_are(tmp_path: Path) -> None:
    tiny_fp8.write(tmp_path, "blocks", tiny_fp8.model("qwen3-moe"))
    _, arena = tiny.load(tmp_path, dtype=torch.bfloat16)
    assert arena.view("layers.0.mlp.router.weight").dtype == torch.bfloat16
    assert arena.view("layers.0.mlp.experts.down").dtype == FP8
    assert arena.view("layers.0.mlp.experts.down_scale").shape == (5, 192, 2)
    tensors = load_file(tmp_path / "model.safetensors")
    router = "model.layers.0.mlp.gate.weight"
    save_file({**tensors, router: tensors[router].to(FP8)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"mlp.gate.weight' has type F8_E4M3; supported: "):
        tiny.load(tmp_path, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"down_proj.weight_scale_inv": None}, r"experts.4.down_proj.weight' is in FP8, and .* has no scale"),
        ({"down_proj.weight": torch.zeros(192, 256)}, "is a scale, but there is no .*4.down_proj.weight' in"),
        ({"down_proj.weight_scale_inv": torch.ones(3, 3)}, r"shape \[3, 3\] .*\[192, 1\], \[2, 2\] and"),
        ({"up_proj.weight_scale_inv": torch.full((2, 2), torch.nan)}, "4.up_proj.weight' has .* NaN or inf"),
        ({"up_proj.weight": torch.full((256, 192), torch.nan).to(FP8)}, "4.up_proj.weight' has 49152 values"),
    ],
)  # fmt: skip
def test_wrong_experts_are_refused(change: dict[str, Any], expected: str, tmp_path: Path) -> None:
    tiny_fp8.write(tmp_path, "blocks", tiny_fp8.model("qwen3-moe"))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"model.layers.0.mlp.experts.4.{name}": tensor for name, tensor in change.items()}
    tensors = {name: each for name, each in tensors.items() if each is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=expected):
        tiny.load(tmp_path, dtype=torch.bfloat16)


def test_a_checkpoint_in_fp8_cannot_be_unquantized(tmp_path: Path) -> None:
    tiny_fp8.write(tmp_path, "rows", tiny_fp8.model("llama"))
    with pytest.raises(ConfigError, match="quantization='none', but the checkpoint is in FP8; leave"):
        resolve(str(tmp_path), "auto", tmp_path, quantization="none")


def test_ranks_cannot_cut_blocks(tmp_path: Path) -> None:
    tiny_fp8.write(tmp_path, "blocks", tiny_fp8.model("llama"))
    with pytest.raises(TensorParallelError, match=r"columns 0 to 64 of .*o_proj.weight'; they must"):
        tiny.load(tmp_path, tp=TPInfo(0, 4), dtype=torch.bfloat16)
    tiny_fp8.write(tmp_path / "experts", "blocks", tiny_fp8.model("qwen3-moe", moe_intermediate_size=192))
    with pytest.raises(TensorParallelError, match=r"columns 0 to 96 of .*experts.0.down_proj.weight'; they"):
        tiny.load(tmp_path / "experts", tp=TPInfo(0, 2), dtype=torch.bfloat16)
