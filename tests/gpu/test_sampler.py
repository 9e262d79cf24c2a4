"""The sampler on a CUDA device takes the tokens it takes on a CPU."""

import numpy as np
import pytest
import torch

from segue.kvcache.page_table import PageTable
from segue.messages.requests import SamplingParams, pack_ids
from segue.messages.steps import NON_FINITE, NewSlot, StepPlan
from segue.model_runner.batch_state import BatchState
from segue.model_runner.sampler import Sampler

pytestmark = pytest.mark.gpu

VOCAB, ROWS = 50257, 128
KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.7, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.3, "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    {"temperature": 0.0, "logit_bias": {7: 20.0}, "min_new_tokens": 4, "stop_token_ids": (7, 9)},
    {"temperature": 0.5, "logprobs": 3},
]


def _sample(device: str, logits: torch.Tensor):
    table = PageTable(max_running=ROWS, max_seq_len=64, page_size=4, scratch_page=99, device=device)
    state = BatchState(
        max_running_requests=ROWS, max_seq_len=64, page_table=table, device=torch.device(device)
    )
    new_slots = [
        NewSlot(row, pack_ids(range(row, row + 20)), 15, SamplingParams(max_new_tokens=9, seed=row, **kind))
        for row, kind in enumerate(KINDS[i % len(KINDS)] for i in range(ROWS))
    ]
    rows, flags = list(range(ROWS)), [True] * ROWS
    pages = [(row, 0, [row]) for row in rows]
    state.apply(StepPlan(1, new_slots, pages, 0, rows, [0] * ROWS, [20] * ROWS, [1] * ROWS, flags, "full"))
    state.writer.flush()
    assert state.page_table.data[:ROWS, 0].tolist() == rows
    return Sampler(state).sample(logits.to(device), np.array(rows), np.full(ROWS, 20), "full")


def test_rows_that_are_not_finite_are_told_as_on_the_cpu():
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    spoilt = range(0, ROWS, 5)  # of every kind
    for row in spoilt:
        logits[row, row::100] = (torch.nan, torch.inf)[row % 2]
    expected, found = _sample("cpu", logits.clone()), _sample("cuda", logits.clone())
    for sampled in (expected, found):
        assert (sampled.tokens == NON_FINITE).nonzero().flatten().tolist() == list(spoilt)
        assert sampled.logprobs is not None
        wanted = [row in spoilt for row in sampled.logprob_indices]
        assert sampled.logprobs.chosen.isnan().tolist() == wanted


def test_tokens_and_logprobs_are_those_of_the_cpu():
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    expected, found = _sample("cpu", logits.clone()), _sample("cuda", logits.clone())
    assert found.tokens.is_cuda
    # exp and log differ in the last bit, which may decide a draw once in a long while.
    assert (found.tokens.cpu() == expected.tokens).float().mean() > 0.98
    assert found.logprobs is not None and expected.logprobs is not None
    torch.testing.assert_close(found.logprobs.chosen.cpu(), expected.logprobs.chosen, atol=1e-4, rtol=1e-4)
