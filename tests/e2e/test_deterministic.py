"""SmolLM2 with `--deterministic`: requests give the same tokens and bits together as alone."""

from __future__ import annotations

from typing import Any

import pytest

import segue
from tests.e2e.teacher import greedy
from tests.fixtures import reference

CASES = reference.load().cases
PROMPTS = [case.prompt_ids for case in CASES] + [CASES[0].prompt_ids[:9], CASES[1].prompt_ids[:7]]
SHORT = sorted((prompt[:72] for prompt in PROMPTS), key=len)
WITH_LOGPROBS: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 2}


def replies(engine: Any, prompts: list[list[int]], num_tokens: int) -> list[tuple[Any, ...]]:
    """Runs requests together, and returns what must be equal; floats are not rounded, so bit for bit."""
    found = engine.generate(input_ids=prompts, sampling_params=greedy(num_tokens), **WITH_LOGPROBS)
    return [
        (
            reply["output_ids"],
            [entry[:2] for entry in reply["meta_info"]["output_token_logprobs"]],
            [[pair[:2] for pair in top] for top in reply["meta_info"]["output_top_logprobs"]],
        )
        for reply in found
    ]


def make_engine(dtype: str, **options: Any) -> Any:
    return segue.Engine(
        dtype=dtype,
        embedded=True,
        deterministic=True,
        max_running_requests=32,
        chunked_prefill_size=96,
        **options,
    )


def test_32_requests_together_equal_each_alone() -> None:
    assert len(SHORT) == 32
    with make_engine("bfloat16", disable_prefix_cache=True) as engine:
        together = replies(engine, SHORT, 4)
        for i in range(1, 32, 7):
            assert replies(engine, [SHORT[i]], 4) == [together[i]], i


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_32_longer_requests_equal_each_alone_and_with_a_cached_prefix(dtype: str) -> None:
    with make_engine(dtype) as engine:
        alone = [replies(engine, [prompt], 16)[0] for prompt in PROMPTS]
        assert replies(engine, PROMPTS, 16) == alone  # prefixes are cached now
    with make_engine(dtype, disable_prefix_cache=True, page_size=4) as engine:
        assert replies(engine, PROMPTS, 16) == alone
