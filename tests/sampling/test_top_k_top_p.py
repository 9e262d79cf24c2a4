"""top-k, top-p and min-p, compared with the warpers of transformers."""

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from segue.sampling.top_k_top_p import candidates

SETTINGS = [  # temperature, top_k, top_p, min_p
    (1.0, 1, 1.0, 0.0),
    (1.0, 50, 1.0, 0.0),
    (0.7, 63, 1.0, 0.0),
    (0.7, 64, 1.0, 0.0),
    (2.0, 500, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (0.3, 0, 0.5, 0.0),
    (3.0, 0, 0.99, 0.0),  # thousands of candidates
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 1.0, 0.1),
    (5.0, 0, 1.0, 0.01),
    (1.0, 0, 1.0, 1.0),
    (0.8, 40, 0.9, 0.0),
    (0.8, 40, 0.95, 0.05),
    (1.5, 100, 0.8, 0.02),
]


def _logits(rows: int, vocab: int) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(5)) * 3


def _run(logits: torch.Tensor, settings: list[tuple[float, int, float, float]]) -> torch.Tensor:
    """Return the probabilities after the filters, `[n, V]`."""
    temperature, top_k, top_p, min_p = zip(*settings, strict=True)
    weights, ids = candidates(
        logits,
        inverse_temperatures=1 / torch.tensor(temperature),
        top_k=torch.tensor(top_k),
        top_p=torch.tensor(top_p),
        min_p=torch.tensor(min_p),
        max_top_k=max(top_k),
    )
    spread = torch.zeros_like(logits).scatter_add_(1, ids, weights)
    return spread / spread.sum(-1, keepdim=True)


def _reference(logits: torch.Tensor, setting: tuple[float, int, float, float]) -> torch.Tensor:
    temperature, top_k, top_p, min_p = setting
    scores = TemperatureLogitsWarper(temperature)(None, logits.clone())
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(None, scores)
    return scores.softmax(-1)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("vocab", [300, 20000])
def test_the_filters_equal_those_of_transformers(setting, vocab):
    logits = _logits(6, vocab)
    torch.testing.assert_close(_run(logits, [setting] * 6), _reference(logits, setting), atol=1e-6, rtol=1e-5)


def test_rows_of_one_batch_may_have_different_filters():
    logits = _logits(len(SETTINGS), 5000)
    together = _run(logits, SETTINGS)
    for i, setting in enumerate(SETTINGS):
        alone = _run(logits[i : i + 1], [setting])
        assert torch.equal(together[i : i + 1] > 0, alone > 0), setting


def test_ties_with_the_last_kept_token_are_kept():
    logits = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0]])
    assert (_run(logits, [(1.0, 2, 1.0, 0.0)]) > 0).tolist() == [[True, True, True, True, False]]


def test_ties_beyond_the_first_candidates_are_kept():
    logits = torch.zeros(1, 8000)
    logits[0, 4000:] = -1
    assert (_run(logits, [(1.0, 5, 1.0, 0.0)]) > 0).sum() == 4000


def test_top_k_beyond_the_vocabulary_keeps_everything():
    logits = _logits(1, 10)
    torch.testing.assert_close(_run(logits, [(1.0, 1000, 1.0, 0.0)]), logits.softmax(-1))


def test_masked_tokens_are_ruled_out():
    logits = torch.full((1, 200), -torch.inf)
    logits[0, [4, 150]] = torch.tensor([1.0, 0.0])
    assert (_run(logits, [(1.0, 50, 1.0, 0.0)]) > 0).nonzero()[:, 1].tolist() == [4, 150]


def test_tokens_of_weight_zero_leave_no_row_undecided():
    logits = torch.full((1, 5000), -200.0)
    logits[0, 17] = 0.0
    weights, _ = candidates(
        logits,
        inverse_temperatures=torch.ones(1),
        top_k=torch.tensor([60]),
        top_p=torch.ones(1),
        min_p=torch.zeros(1),
        max_top_k=60,
    )
    assert weights.shape == (1, 64)


def test_the_top_k_of_another_row_changes_nothing():
    # Logits in steps of 1/4, as in bfloat16: more tokens are as likely as the 60th than the first candidates.
    logits = (_logits(64, 20_000) * 4).round() / 4
    alone = _run(logits, [(1.0, 60, 0.9, 0.0)] * 64)
    beside = _run(torch.cat([logits, logits[:1]]), [(1.0, 60, 0.9, 0.0)] * 64 + [(1.0, 500, 1.0, 0.0)])[:-1]
    assert torch.equal(beside > 0, alone > 0)
