"""The sampler chooses the same tokens on a CUDA device as on a CPU."""

import numpy as np
import pytest
import torch

from segue.guided.matchers import Allowed
from segue.kvcache.page_table import PageTable
from segue.messages.guided import GrammarSpec
from segue.messages.requests import SamplingParams, pack_ids
from segue.messages.steps import NON_FINITE, NewSlot, StepPlan
from segue.model_runner.batch_state import BatchState
from segue.model_runner.mask_table import MaskTable
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
    {"temperature": 2.0, "allowed_token_ids": pack_ids(range(0, VOCAB, 7)), "bad_words": ((14,), (1, 2, 21))},
    {"temperature": 0.0, "bad_words": tuple((slot + 19, best) for slot in range(ROWS) for best in (1, 5, 9))},
]


class Grammars:
    """Stands for `Matchers`: every second row has a grammar, which allows half of the tokens."""

    def __init__(self, masks: MaskTable) -> None:
        self._masks = masks.host  # read by the device, too
        self._masks[:] = np.random.default_rng(0).integers(-(2**31), 2**31, self._masks.shape)

    def wait(self, slots: np.ndarray) -> tuple[np.ndarray, dict[int, str]]:
        return (slots % 2 == 0).nonzero()[0], {}

    def allowed(self, slots: np.ndarray) -> Allowed:
        rows, failures = self.wait(slots)
        return Allowed(rows=rows, masks=self._masks[slots[rows]], failures=failures)


def _sample(device: str, logits: torch.Tensor, guided: bool = False, shared: bool = False):
    table = PageTable(max_running=ROWS, max_seq_len=64, page_size=4, scratch_page=99, device=device)
    state = BatchState(table, max_seq_len=64)
    new_slots = [
        NewSlot(
            slot,
            pack_ids(range(slot, slot + 20)),
            15,
            SamplingParams(
                max_new_tokens=9,
                seed=slot,
                grammar=GrammarSpec("regex", "a") if guided and slot % 2 == 0 else None,
                **kind,
            ),
        )
        for slot, kind in enumerate(KINDS[i % len(KINDS)] for i in range(ROWS))
    ]
    if guided:
        state.masks = MaskTable(len(table.data), VOCAB, state.device, shared=shared)
    slots, flags = list(range(ROWS)), [True] * ROWS
    pages = [(slot, 0, [slot]) for slot in slots]
    state.apply(StepPlan(1, new_slots, pages, 0, slots, [0] * ROWS, [20] * ROWS, [1] * ROWS, flags, "full"))
    state.writer.flush()
    assert state.page_table.data[:ROWS, 0].tolist() == slots
    if guided:  # after `apply`, which would give them the grammars
        state.matchers = Grammars(state.masks)
    sampled = Sampler(state).sample(logits.to(device), np.array(slots), np.full(ROWS, 20), "full")
    if shared:  # the masks go with the state, and the device may still read them
        torch.cuda.synchronize()
        state.masks.close()
    return sampled


def test_non_finite_rows_have_no_token_as_on_the_cpu():
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    non_finite = range(0, ROWS, 5)  # includes rows of every kind
    for row in non_finite:
        logits[row, row::100] = (torch.nan, torch.inf)[row % 2]
    expected, found = _sample("cpu", logits.clone()), _sample("cuda", logits.clone())
    for sampled in (expected, found):
        assert (sampled.tokens == NON_FINITE).nonzero().flatten().tolist() == list(non_finite)
        assert sampled.logprobs is not None
        expected_nan = [row in non_finite for row in sampled.logprob_indices]
        assert sampled.logprobs.chosen.isnan().tolist() == expected_nan


def test_tokens_and_logprobs_are_those_of_the_cpu():
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    expected, found = _sample("cpu", logits.clone()), _sample("cuda", logits.clone())
    assert found.tokens.is_cuda
    # exp and log differ in the last bit, which rarely changes a draw.
    assert (found.tokens.cpu() == expected.tokens).float().mean() > 0.98
    assert found.logprobs is not None and expected.logprobs is not None
    torch.testing.assert_close(found.logprobs.chosen.cpu(), expected.logprobs.chosen, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shared", [False, True])
def test_guided_rows_draw_what_their_masks_allow_as_on_the_cpu(shared):
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    expected, found = (
        _sample("cpu", logits.clone(), guided=True),
        _sample("cuda", logits.clone(), guided=True, shared=shared),
    )
    tokens = found.tokens.cpu()
    assert (tokens == expected.tokens).float().mean() > 0.98
    masks = MaskTable(ROWS + 1, VOCAB, torch.device("cpu"))
    Grammars(masks)
    words = masks.host[np.arange(ROWS), tokens.numpy() // 32]
    assert ((words >> (tokens.numpy() % 32)) & 1)[::2].all()
    free = _sample("cuda", logits.clone())
    assert torch.equal(free.tokens.cpu()[1::2], tokens[1::2]) and not torch.equal(free.tokens.cpu(), tokens)
    assert found.logprobs is not None and expected.logprobs is not None
    same = (tokens == expected.tokens)[found.logprob_indices]
    torch.testing.assert_close(
        found.logprobs.chosen.cpu()[same], expected.logprobs.chosen[same], atol=1e-4, rtol=1e-4
    )
