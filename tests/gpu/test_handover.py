"""A prefill engine and a decode engine on GPUs give the bits of one engine, on one GPU and on two."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.e2e import test_handover as on_cpu
from tests.e2e.pair import Pair, greedy, ids

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

NUM_GPUS = torch.cuda.device_count()
OPTIONS = {"device": "cuda", "dtype": "bfloat16", "page_size": 4}
WAYS = [
    pytest.param(1, id="one GPU"),
    pytest.param(2, id="two GPUs", marks=pytest.mark.skipif(NUM_GPUS < 2, reason="needs 2 GPUs")),
]


def visible(*order: int) -> str:
    """CUDA_VISIBLE_DEVICES with these of the devices that this process sees, in this order."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return ",".join(names[index] if names != [""] else str(index) for index in order)


@pytest.fixture(scope="module", params=WAYS)
def pair(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    """On one GPU the engines are in this process, on two in processes of their own."""
    gpus = (visible(0, 1), visible(1, 0)) if request.param == 2 else None
    pair = Pair(tiny_model, gpus=gpus, deterministic=True, **OPTIONS)
    yield pair
    pair.close()


# The tests of a pair on a CPU, with the pair above.
test_at_the_edges_of_pages_and_chunks = on_cpu.test_at_the_edges_of_pages_and_chunks
test_few_tokens = on_cpu.test_few_tokens
test_a_stop_token_as_first_token = on_cpu.test_a_stop_token_as_first_token
test_prompts_that_an_engine_has_in_its_prefix_cache = (
    on_cpu.test_prompts_that_an_engine_has_in_its_prefix_cache
)
test_the_same_prompt_again = on_cpu.test_the_same_prompt_again
test_log_probabilities = on_cpu.test_log_probabilities
test_sampling = on_cpu.test_sampling
test_a_prompt_goes_on_with_the_seed_of_its_first_token = (
    on_cpu.test_a_prompt_goes_on_with_the_seed_of_its_first_token
)
test_stop_strings_that_begin_in_the_first_token = on_cpu.test_stop_strings_that_begin_in_the_first_token
test_a_batch = on_cpu.test_a_batch
test_a_stream = on_cpu.test_a_stream
test_nothing_is_left_behind = on_cpu.test_nothing_is_left_behind


@pytest.mark.skipif(NUM_GPUS < 3, reason="needs 3 GPUs")
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=str)
def test_engines_of_several_ranks(tiny_model: Path, sizes: tuple[int, int]) -> None:
    """Each rank sends its heads of each page to the ranks that need them."""
    gpus = (visible(0, 1, 2), visible(*((2, 0, 1) if sizes[0] == 2 else (1, 2, 0))))
    pair = Pair(tiny_model, tp=sizes, gpus=gpus, **OPTIONS)
    try:
        call = {"input_ids": ids(41, seed=41), "sampling_params": greedy(6), "return_logprob": True}
        whole, (_, decoded) = pair.whole.generate(**call), pair.split(**call)
        one, two = (
            [entry[0] for entry in reply["meta_info"]["output_token_logprobs"]] for reply in (whole, decoded)
        )
        assert two == pytest.approx(one, abs=0.05)  # ranks add in another order, in bfloat16
        assert pair.handover(pair.decode)["num_adopted"] == 1
    finally:
        pair.close()
