"""The models of bench.untuned are those that it names, and none of them is in a stored table."""

import json
from pathlib import Path

import pytest

import segue
from bench import untuned
from segue.models.config import ModelConfig

# Billions of parameters.
SIZES = {"llama-3.2-1b": 1.24, "qwen3-4b": 4.02, "qwen3-14b": 14.77, "llama-3.1-8b": 8.03, "mistral-7b": 7.25}


@pytest.mark.parametrize("name", untuned.MODELS)
def test_a_model_has_its_number_of_parameters(name) -> None:
    model = ModelConfig.from_hf(untuned.MODELS[name])
    heads = (2 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    layer = model.hidden_size * (heads + 3 * model.intermediate_size)
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    assert (model.num_layers * layer + embeddings) / 1e9 == pytest.approx(SIZES[name], rel=0.005)


def test_the_roofline_of_a_small_batch_is_that_of_reading_the_weights() -> None:
    found = untuned.rooflines(ModelConfig.from_hf(untuned.MODELS["qwen3-4b"]))
    assert found[1] == pytest.approx(1.94, rel=0.02)
    assert found[256] > found[100] > found[32] > found[8] > found[1]


def test_most_shapes_of_the_models_are_in_no_stored_table() -> None:
    table = Path(segue.__path__[0]) / "kernels" / "triton" / "gemm.json"
    stored = {key for each in json.loads(table.read_text()) for key in each["plans"]}
    for name in untuned.MODELS:
        model = ModelConfig.from_hf(untuned.MODELS[name])
        assert f"{2 * model.intermediate_size}x{model.hidden_size}" not in stored


def test_the_gemms_of_a_step_are_those_that_serve_its_rows() -> None:
    def gemm(name: str, rows: int, library: float, plan: float | None) -> dict[str, object]:
        return {"gemm": name, "rows": rows, "cuBLAS, us": library, "plan, us": plan, "layers": 10}

    times = [
        gemm("8x4, gated", 33, 300.0, 200.0),
        gemm("8x4, gated", 64, 400.0, 300.0),
        gemm("8x4, split", 65, 500.0, None),
        gemm("8x4, split", 96, 700.0, None),
        gemm("4x8, split", 96, 900.0, 100.0),
    ]
    assert untuned.in_gemms(times, 34) == pytest.approx(4.0)
    assert untuned.in_gemms(times, 66) == pytest.approx(8.0)
