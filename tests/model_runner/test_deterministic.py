"""`--deterministic` on a CPU: tokens and bits of logprobs do not depend on batch, chunks or retractions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from segue.attention.cpu_invariant import InvariantCPUAttention
from segue.distributed.info import TPInfo
from segue.errors import ConfigError, TensorParallelError
from segue.layers import moe_backend
from tests.model_runner import making, tiny
from tests.model_runner.planner import Planner, Sequence

CHUNKS = [4, 7, 64, 512]
MODELS = {"llama": tiny.save_llama, "qwen3": tiny.save_qwen3, "qwen3-moe": tiny.save_qwen3_moe}
CASES = [
    ("llama", "float32"),
    ("qwen3-moe", "bfloat16"),
    ("qwen3", "float32", "fp8"),  # the last one is the dtype of the KV cache
    pytest.param(("llama", "bfloat16"), marks=pytest.mark.slow),
    pytest.param(("qwen3", "float32"), marks=pytest.mark.slow),
    pytest.param(("qwen3-moe", "float32"), marks=pytest.mark.slow),
]
PROMPT = making.prompt(75, seed=1)
NUM_TOKENS = 12
GREEDY: dict[str, Any] = {"logprobs": 3, "prompt_logprobs_start": 1, "num_prompt_top": 3}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": 11, "logprobs": 0}
OPTIONS: dict[str, Any] = {"max_running_requests": 66, "num_kv_tokens": 16384, "chunked_prefill_size": 8192}


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def planner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planner]:
    model, dtype, *kv = request.param
    directory = tmp_path_factory.mktemp(model)
    MODELS[model](directory)
    options = OPTIONS | {"kv_cache_dtype": kv[0]} if kv else OPTIONS
    runner = making.make_runner(directory, dtype=dtype, deterministic=True, **options)
    yield Planner(runner)
    runner.close()


def result(sequence: Sequence) -> tuple[Any, ...]:
    """Return what must be equal; floats are compared bit for bit."""
    return sequence.output, sequence.logprobs, sequence.prompt_logprobs


def alone(planner: Planner, **params: Any) -> tuple[Any, ...]:
    return result(planner.generate(PROMPT, NUM_TOKENS, **params))


def with_others(planner: Planner, count: int, chunk: int, **params: Any) -> tuple[Any, ...]:
    """Run the request in chunks, then decode it, with each of `count` other requests in some of the steps."""
    rng = random.Random(count * 1000 + chunk)
    others = [
        planner.add(
            making.prompt(rng.randrange(1, 90), seed=100 + i),
            temperature=rng.choice([0.0, 1.0]),
            logprobs=rng.choice([-1, 0, 7]),
            top_k=rng.choice([0, 5]),
        )
        for i in range(count)
    ]
    request = planner.add(PROMPT, **params)
    while len(request.output) < NUM_TOKENS:
        work = []
        for other in rng.sample(others, rng.randrange(count + 1)):
            left = other.launched - other.computed
            work.append((other, min(left, rng.randrange(1, 40))))
        left = request.launched - request.computed
        work.insert(rng.randrange(len(work) + 1), (request, min(left, chunk)))
        planner.run(work)
    for sequence in [*others, request]:
        planner.remove(sequence)
    return result(request)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_request_is_the_same_with_any_others_in_any_chunks(planner: Planner, params: Any) -> None:
    expected = alone(planner, **params)
    for count, chunk in [(0, 4), (1, 7), (3, 512), (16, 64), (64, 7), (64, 512)]:
        assert with_others(planner, count, chunk, **params) == expected, (count, chunk)


def test_a_cached_prefix_changes_nothing(planner: Planner) -> None:
    params = {"logprobs": 3}
    expected = alone(planner, **params)
    size = planner.runner.limits.page_size
    for cached, chunk in [(4, 7), (32, 512), (72, 4)]:
        owner = planner.add(PROMPT[:cached] + making.prompt(9, seed=5))
        planner.prefill(owner, chunk)
        planner.free_pages += owner.pages[: cached // size][::-1]  # the next request gets these pages first
        guest = planner.add(PROMPT, **params)
        guest.computed = cached
        planner.prefill(guest, 512)
        assert guest.pages[: cached // size] == owner.pages[: cached // size]
        planner.decode([guest, owner], NUM_TOKENS - 1)
        assert result(guest) == expected, (cached, chunk)
        owner.pages = owner.pages[cached // size :]
        planner.remove(guest)
        planner.remove(owner)


def retracted(planner: Planner, num_done: int, expected: list[int], chunk: int, **params: Any) -> Sequence:
    """Prefill a request that was retracted after `num_done` tokens, and continue it."""
    sequence = planner.add(PROMPT + expected[:num_done], prompt_len=len(PROMPT), **params)
    planner.prefill(sequence, chunk)
    if NUM_TOKENS - num_done > 1:
        planner.decode([sequence], NUM_TOKENS - num_done - 1)
    planner.remove(sequence)
    return sequence


@pytest.mark.parametrize("params", [{"logprobs": 3}, SAMPLED], ids=["greedy", "sampled"])
def test_a_retraction_at_any_token_changes_nothing(planner: Planner, params: Any) -> None:
    tokens, logprobs, _ = alone(planner, **params)
    for num_done in range(NUM_TOKENS):
        again = retracted(planner, num_done, tokens, CHUNKS[num_done % len(CHUNKS)], **params)
        assert again.output == tokens
        assert again.logprobs == logprobs[num_done:], num_done


def test_attention_that_depends_on_the_batch_fails_the_same_comparisons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without determinism the tests above fail; the ordinary mode might round alike on some CPUs."""
    forward = InvariantCPUAttention.forward

    def depending(self: Any, query: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return forward(self, query, *arguments) * (1.0 if len(query) == 1 else 1.01)

    tiny.save_llama(tmp_path)
    runner = making.make_runner(tmp_path, deterministic=True, **OPTIONS)
    try:
        planner = Planner(runner)
        monkeypatch.setattr(InvariantCPUAttention, "forward", depending)
        tokens, logprobs, _ = alone(planner, logprobs=3)
        assert with_others(planner, 16, 7, logprobs=3)[1] != logprobs
        assert retracted(planner, 8, tokens, 512, logprobs=3).logprobs != logprobs[8:]
    finally:
        runner.close()


def test_options_that_cannot_be_deterministic_are_refused(tmp_path: Path) -> None:
    tiny.save_llama(tmp_path)
    with pytest.raises(ConfigError, match="its bits depend on the batch"):
        making.make_runner(tmp_path, deterministic=True, attention_backend="cpu")
    with pytest.raises(TensorParallelError, match="use --tp 1 or 2"):
        making.make_runner(tmp_path, TPInfo(0, 4), deterministic=True)
    with pytest.raises(ConfigError, match="with --deterministic"):
        moe_backend.select("torch", torch.device("cpu"), deterministic=True)
