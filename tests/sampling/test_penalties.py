"""Penalties, compared with transformers, and with OpenAI's formula applied token by token."""

import torch
from transformers import RepetitionPenaltyLogitsProcessor

from segue.sampling.penalties import penalise

VOCAB = 40
PROMPT, OUTPUT = [3, 3, 5, 9], [7, 7, 3, 11, 7]


def _logits(rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(2)) * 4


def _penalise(logits: torch.Tensor, *, repetition=1.0, presence=0.0, frequency=0.0, length=9) -> torch.Tensor:
    # Tokens from the length on must not count.
    tokens = torch.tensor([PROMPT + OUTPUT + [20, 21, 7]]).expand(len(logits), -1)
    count = len(logits)
    return penalise(
        logits,
        tokens,
        prompt_lens=torch.full((count,), len(PROMPT)),
        lengths=torch.full((count,), length),
        repetition=torch.full((count,), repetition),
        presence=torch.full((count,), presence),
        frequency=torch.full((count,), frequency),
    )


def test_repetition_penalty_equals_that_of_transformers():
    logits = _logits()
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([PROMPT + OUTPUT]), logits.clone())
    torch.testing.assert_close(_penalise(logits, repetition=1.3), expected)


def test_presence_penalty_counts_output_tokens_once_and_prompt_tokens_never():
    expected = _logits()
    expected[0, [7, 3, 11]] -= 0.5
    torch.testing.assert_close(_penalise(_logits(), presence=0.5), expected)


def test_frequency_penalty_counts_every_occurrence_in_the_output():
    expected = _logits()
    expected[0, 7] -= 3 * 0.25
    expected[0, [3, 11]] -= 0.25
    torch.testing.assert_close(_penalise(_logits(), frequency=0.25), expected)


def test_negative_penalties_increase_the_logits():
    expected = _logits()
    expected[0, 7] += 3 * 0.25 + 1.0
    expected[0, [3, 11]] += 0.25 + 1.0
    torch.testing.assert_close(_penalise(_logits(), frequency=-0.25, presence=-1.0), expected)


def test_presence_penalty_is_applied_after_the_repetition_penalty():
    expected = _penalise(_logits(), repetition=1.5)
    expected[0, [7, 3, 11]] -= 2.0
    torch.testing.assert_close(_penalise(_logits(), repetition=1.5, presence=2.0), expected)


def test_tokens_beyond_the_length_do_not_count():
    logits = _logits()
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([PROMPT + OUTPUT[:1]]), logits.clone())
    torch.testing.assert_close(_penalise(logits, repetition=1.3, length=5), expected)


def test_without_penalties_nothing_changes():
    assert torch.equal(_penalise(_logits(3)), _logits(3))
