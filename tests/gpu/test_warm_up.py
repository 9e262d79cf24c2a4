"""Engines on a CUDA device whose kernel cache is empty: no request makes them compile a kernel."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import segue
from tests.model_runner import making, tiny
from tests.support.tiny_model import write_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

# Options of requests, one kind each.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8},
    "filtered": {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    "penalised": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "biased": {"logit_bias": {"7": 2.0}, "min_new_tokens": 3},
    "ruled": {"allowed_token_ids": list(range(100, 200)), "bad_words": ["a", "the"]},
    "guided": {"regex": "[ab]{4,8}", "temperature": 0.7},
}
GRAPHS = {"graphs": {}, "eager": {"disable_cuda_graph": True}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_model(tmp_path_factory.mktemp("model"))
    config = transformers.AutoConfig.from_pretrained(path)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(path)
    return path


@pytest.fixture(params=GRAPHS)
def engine(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[segue.Engine]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    options = making.options(
        checkpoint,
        device="cuda",
        dtype="bfloat16",
        page_size=16,
        num_kv_tokens=4096,
        max_running_requests=20,
        chunked_prefill_size=100,
        **GRAPHS[request.param],
    )
    with segue.Engine(**options) as engine:
        yield engine


def compiled(engine: segue.Engine) -> tuple[int, int]:
    """Kernels that were compiled, and loaded from the cache on disk, since the engine was ready."""
    state = engine.get_server_info()["internal_states"][0]
    return state["kernel_compilations_after_ready"], state["kernel_loads_after_ready"]


def test_no_request_makes_an_engine_compile_a_kernel(engine: segue.Engine, checkpoint: Path) -> None:
    [kernels] = [s for s in engine.get_server_info()["decided"]["init_steps"] if s["name"] == "kernels"]
    assert int(kernels["detail"].split()[0]) > 20, kernels
    found = {}
    for name, params in KINDS.items():
        for prompts in ([making.prompt(5)], [making.prompt(3 + i, seed=i) for i in range(17)]):
            ids = [[token % 300 for token in prompt] for prompt in prompts]
            for scores in ({}, {"return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 0}):
                engine.generate(
                    input_ids=ids,
                    sampling_params={"max_new_tokens": 9, "ignore_eos": True} | params,
                    **scores,
                )
                found[name, len(prompts), bool(scores)] = compiled(engine)
    long = [token % 300 for token in making.prompt(350)]
    for prompt in (long, long, [*long[:200], 1, 2, 3]):  # chunks, a hit of all, and of a part
        engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 4, "temperature": 0})
    found["long"] = compiled(engine)
    params = {"max_new_tokens": 100, "ignore_eos": True}
    running = threading.Thread(target=lambda: engine.generate(input_ids=[long] * 4, sampling_params=params))
    running.start()
    for mode in ("in_place", "retract"):
        engine.pause_generation(mode)
        engine.continue_generation()
    engine.abort_request(abort_all=True)
    running.join()
    found["paused and aborted"] = compiled(engine)
    engine.update_weights_from_disk(model_path=str(checkpoint))
    engine.generate(input_ids=long, sampling_params={"max_new_tokens": 4})
    found["updated"] = compiled(engine)
    assert {kind: counts for kind, counts in found.items() if counts != (0, 0)} == {}


def test_the_second_start_compiles_nothing(checkpoint: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    details = []
    for _ in range(2):
        with segue.Engine(**making.options(checkpoint, device="cuda", dtype="bfloat16")) as engine:
            steps = engine.get_server_info()["decided"]["init_steps"]
            details += [step["detail"] for step in steps if step["name"] == "kernels"]
    assert details[1].startswith("0 compiled, "), details


def test_the_warm_up_does_not_change_tokens(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    model = tiny.save_llama(tmp_path / "model")
    prompts = [making.prompt(length, seed=length) for length in (1, 7, 40)]
    for options in GRAPHS.values():
        with segue.Engine(**making.options(tmp_path / "model", device="cuda", **options)) as engine:
            for prompt in prompts:
                reply = engine.generate(
                    input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 12}
                )
                assert reply["output_ids"] == tiny.reference(model, prompt, 12)
