"""What FP8 costs in accuracy: within its rounding on a tiny model, and within 1 % of SmolLM2's perplexity."""

from pathlib import Path

import pytest

import segue
from bench import fp8_accuracy
from tests.checkpoint import tiny, tiny_fp8
from tests.model_runner import making


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_fp8.model("qwen3", vocab_size=making.VOCAB)
    return tiny.save(model, tmp_path_factory.mktemp("model"))


def test_log_probabilities_differ_by_the_rounding_of_fp8(directory: Path) -> None:
    prompts = [making.prompt(length, seed=length) for length in (90, 60, 1, 30)]
    found = fp8_accuracy.measure(prompts, **making.options(directory))
    assert found["none"]["rms"] == found["none"]["rise"] == 0.0
    weights, both = found["weights"], found["weights and activations"]
    assert 0.005 < weights["rms"] < 0.1 and abs(weights["rise"]) < 2.0
    assert weights["rms"] < both["rms"] < 0.15
    kv, with_weights = found["KV cache"], found["weights and KV cache"]
    assert 0.001 < kv["rms"] < with_weights["rms"] < 0.1 and abs(kv["rise"]) < 2.0


def test_an_engine_says_that_it_is_in_fp8(directory: Path) -> None:
    with segue.Engine(**making.options(directory), quantization="fp8", embedded=True) as engine:
        info = engine.get_server_info()
        assert info["quantization"] == "fp8"
        (start,) = (each for each in info["decided"]["init_steps"] if each["name"] == "device")
        assert "torch.float32, linear layers in FP8, rank 0" in start["detail"]


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [{"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}], ids=["weights", "KV"])
def test_the_perplexity_of_smollm2_is_within_1_percent(fp8: dict[str, str]) -> None:
    options = {"device": "cpu", "disable_prefix_cache": True}
    text = "\n".join(path.read_text() for path in sorted(fp8_accuracy.DOCS.glob("*.md")))
    prompts = fp8_accuracy.prompts_of(text, 8192, options)
    base = fp8_accuracy.logprobs(prompts, **options)
    found = fp8_accuracy.compare(base, fp8_accuracy.logprobs(prompts, **options, **fp8))
    assert -0.5 < found["rise"] < 1.0
