"""A KV cache in FP8 on a CPU: what it changes in results, and what it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import segue
from segue.model_runner.startup import Startup
from tests.checkpoint import tiny, tiny_fp8
from tests.model_runner import making

PROMPTS = [making.prompt(length, seed=length) for length in (90, 60, 2, 30)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_fp8.model("qwen3", vocab_size=making.VOCAB)
    return tiny.save(model, tmp_path_factory.mktemp("model"))


def logprobs(engine: segue.Engine, num_tokens: int = 8) -> tuple[torch.Tensor, list[Any]]:
    """The log-probabilities of the prompts, and those of the greedy output."""
    found = engine.generate(
        input_ids=PROMPTS,
        sampling_params={"max_new_tokens": num_tokens, "temperature": 0.0},
        return_logprob=True,
        logprob_start_len=0,
    )
    each = [entry[0] for one in found for entry in one["meta_info"]["input_token_logprobs"]]
    output = [one["meta_info"]["output_token_logprobs"] for one in found]
    return torch.tensor([value for value in each if value is not None]), output


def test_log_probabilities_differ_by_the_rounding_of_fp8(directory: Path) -> None:
    options = making.options(directory, embedded=True, disable_prefix_cache=True)
    with segue.Engine(**options) as engine:
        expected, _ = logprobs(engine)
        plain = engine.get_server_info()
    all_found = []
    for more in ({}, {"chunked_prefill_size": 7}, {"dtype": "bfloat16"}):
        with segue.Engine(**options | more, kv_cache_dtype="fp8") as engine:
            found, _ = logprobs(engine)
            all_found.append(found)
            info = engine.get_server_info()
        rms = (found - expected).square().mean().sqrt().item()
        assert 0.001 < rms < 0.05
        assert (plain["kv_cache_dtype"], info["kv_cache_dtype"]) == ("auto", "fp8")
        (pool,) = (each for each in info["decided"]["init_steps"] if each["name"] == "KV pool")
        (before,) = (each for each in plain["decided"]["init_steps"] if each["name"] == "KV pool")
        assert pool["detail"] == "fp8" and pool["num_bytes"] == before["num_bytes"] // 4  # from float32
    whole, chunked, _ = all_found
    assert (whole - chunked).abs().max() < 1e-4  # both attend to the keys and values that are stored
    assert "avx512" not in info["decided"]["attention_backend"]


def test_an_update_by_a_checkpoint_with_other_scales_keeps_those_of_the_cache(tmp_path: Path) -> None:
    """What is cached was written with them, and running requests go on with it."""
    paths = [tmp_path / name for name in ("first", "second")]
    for path, scale in zip(paths, (0.5, 0.25), strict=True):
        torch.manual_seed(1)
        tiny_fp8.write(path, "static", tiny_fp8.model("qwen3", vocab_size=making.VOCAB))
        tensors = load_file(path / "model.safetensors")
        for layer in range(2):
            tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(scale)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    options = making.options(paths[0], embedded=True, deterministic=True, kv_cache_dtype="fp8")
    with segue.Engine(**options) as engine:
        (pool,) = (
            each for each in engine.get_server_info()["decided"]["init_steps"] if each["name"] == "KV pool"
        )
        assert "fp8 with scales" in pool["detail"]
        _, before = logprobs(engine)
        engine.update_weights_from_disk(str(paths[1]))
        _, after = logprobs(engine)
    assert after == before  # the weights are equal


def test_a_pool_in_fp8_has_room_for_twice_the_tokens(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages: dict[str, int] = {}
    for kv in ("auto", "fp8"):
        make_pool = Startup._make_pool

        def record(startup: Startup, kv: str = kv, make_pool: Any = make_pool) -> Any:
            pages[kv] = startup.limits.num_pages
            return make_pool(startup)

        with monkeypatch.context() as patch:
            patch.setattr(Startup, "_make_pool", record)
            patch.setattr("segue.model_runner.demand.CPU_POOL_LIMIT", 1 << 18)
            options = {"dtype": "bfloat16", "num_kv_tokens": None, "kv_cache_dtype": kv}
            making.make_runner(directory, **options).close()
    assert pages["fp8"] + 1 == 2 * (pages["auto"] + 1)
