"""The scales of keys and values that published checkpoints in FP8 have."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from segue.checkpoint.kv_scales import read_kv_scales
from segue.checkpoint.source import resolve
from segue.errors import ModelFileError
from segue.model_runner import startup
from tests.checkpoint import tiny, tiny_fp8
from tests.model_runner import making


def add(directory: Path, **scales: torch.Tensor) -> None:
    """Add scales to the second of two layers; `__` in a name stands for a dot."""
    tensors = load_file(directory / "model.safetensors")
    for name, scale in scales.items():
        tensors[f"model.layers.1.self_attn.{name.replace('__', '.')}"] = scale
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tiny_fp8.write(tmp_path, "static", tiny_fp8.model("qwen3", vocab_size=making.VOCAB))
    return tmp_path


@pytest.mark.parametrize(
    "scales",
    [
        {"k_scale": torch.tensor(0.25), "v_scale": torch.tensor(3.0)},
        {"k_proj__k_scale": torch.tensor([0.25]), "v_proj__v_scale": torch.tensor([3.0])},
        {"k_proj__output_scale": torch.tensor([0.25]), "v_proj__output_scale": torch.tensor([3.0])},
        {"kv_scale": torch.tensor(3.0), "k_scale": torch.tensor(0.25)},
        {"k_scale": torch.tensor([0.25, 0.125]).bfloat16(), "v_scale": torch.tensor([[3.0], [2.0]])},
    ],
    ids=["of the attention", "of the projections", "of the outputs of projections", "of both", "several"],
)
def test_an_engine_has_the_scales_of_its_checkpoint(scales: dict[str, torch.Tensor], directory: Path) -> None:
    add(directory, **scales)
    runner = making.make_runner(directory, kv_cache_dtype="fp8")
    try:
        assert runner.kv.scales == [(1.0, 1.0), (0.25, 3.0)]
        assert "scales" in runner.kv.format
    finally:
        runner.close()


def test_a_checkpoint_without_scales_has_none(
    directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cache = tmp_path_factory.mktemp("cache")
    assert read_kv_scales(resolve(str(directory), "auto", cache)) is None
    add(directory, v_scale=torch.tensor(0.5))
    assert read_kv_scales(resolve(str(directory), "auto", cache)) == [(1.0, 1.0), (1.0, 0.5)]
    assert read_kv_scales(resolve(str(directory), "dummy", cache)) is None


@pytest.mark.parametrize("name", ["k_scale", "k_proj__output_scale", "kv_scale"])
@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_a_checkpoint_may_have_scales_of_keys_and_values_alone(name: str, kv: str, tmp_path: Path) -> None:
    """Its weights are in bfloat16, and `quantization_config` describes the KV cache."""
    tiny.save(tiny_fp8.model("llama", vocab_size=making.VOCAB), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": scheme,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    add(tmp_path, **{name: torch.tensor([0.5])})
    runner = making.make_runner(tmp_path, kv_cache_dtype=kv)
    try:
        assert runner.source.config.fp8 is None
        assert runner.kv.scales[1][0] == (0.5 if kv == "fp8" else 1.0)
    finally:
        runner.close()


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-40, 1e37, float("nan"), float("inf")])
def test_a_scale_of_no_use_is_refused(scale: float, directory: Path, tmp_path: Path) -> None:
    """One that is very small has no finite inverse, and with one that is very large, 448 is not finite."""
    add(directory, k_scale=torch.tensor(scale))
    with pytest.raises(ModelFileError, match=r"self_attn\.k_scale.* must be a number from 1\.18e-38 to 7"):
        read_kv_scales(resolve(str(directory), "auto", tmp_path))


def test_a_scale_of_no_use_is_refused_before_the_weights_are_loaded(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(directory, k_scale=torch.tensor(0.0))
    monkeypatch.delattr(startup, "load_weights")
    with pytest.raises(ModelFileError, match=r"self_attn\.k_scale"):
        making.make_runner(directory, kv_cache_dtype="fp8")


def test_a_checkpoint_of_small_models_needs_no_scales(tmp_path: Path) -> None:
    tiny.save(tiny_fp8.model("llama", vocab_size=making.VOCAB), tmp_path)
    runner = making.make_runner(tmp_path, kv_cache_dtype="fp8_e4m3")
    try:
        assert runner.kv.format == "fp8" and runner.kv_bytes == runner.kv.data.numel()
    finally:
        runner.close()
