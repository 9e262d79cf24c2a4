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
