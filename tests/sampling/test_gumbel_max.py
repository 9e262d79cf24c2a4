"""Argmax, keyed draws and the k largest logits, for vocabularies of any size."""

import pytest
import torch

from segue.messages.steps import NON_FINITE
from segue.sampling.gumbel_max import argmax, draw, draw_candidates, largest

VOCABS = [1, 7, 128, 331, 4096, 50257]


def _logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def _chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Return by how many standard deviations the chi-square statistic exceeds its expectation."""
    expected = probabilities.double() * counts.sum()
    assert expected.min() > 5
    freedom = len(counts) - 1
    return float(((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5


def _draws(logits: torch.Tensor, inverse_temperature: float, count: int) -> torch.Tensor:
    rows = logits.expand(count, -1)
    return draw(rows, torch.full((count,), inverse_temperature), torch.full((count,), 9), torch.arange(count))


@pytest.mark.parametrize("vocab", VOCABS)
def test_argmax_equals_that_of_torch(vocab):
    logits = _logits(5, vocab)
    assert argmax(logits).tolist() == logits.argmax(-1).tolist()


def test_argmax_takes_the_lowest_of_equals():
    logits = torch.zeros(3, 1000)
    logits[1, [300, 301, 900]] = 2.0
    logits[2, 999] = 1.0
    assert argmax(logits).tolist() == [0, 300, 999]


@pytest.mark.parametrize("vocab", [6, 300, 331])
def test_draws_follow_the_softmax(vocab):
    logits = _logits(1, vocab, seed=3) / 6
    counts = torch.bincount(_draws(logits, 1 / 0.8, 25_000), minlength=vocab)
    assert _chi_square(counts, (logits[0] / 0.8).softmax(-1)) < 4


def test_draws_with_different_seeds_follow_the_softmax():
    logits = _logits(1, 50, seed=4) / 3
    count = 25_000
    tokens = draw(logits.expand(count, -1), torch.ones(count), torch.arange(count), torch.full((count,), 12))
    assert _chi_square(torch.bincount(tokens, minlength=50), logits[0].softmax(-1)) < 4


def test_a_draw_depends_on_its_own_row_only():
    logits = _logits(16, 50257)
    inverse, seeds, positions = torch.linspace(0.5, 2, 16), torch.arange(16), torch.arange(16) * 7
    together = draw(logits, inverse, seeds, positions)
    for i in range(16):
        alone = draw(logits[i : i + 1], inverse[i : i + 1], seeds[i : i + 1], positions[i : i + 1])
        assert alone.item() == together[i]
    assert len(set(together.tolist())) > 8


def test_seed_and_position_change_the_draw():
    logits = torch.zeros(3, 5000)
    tokens = draw(logits, torch.ones(3), torch.tensor([1, 2, 1]), torch.tensor([5, 5, 6]))
    assert len(set(tokens.tolist())) == 3


def test_a_small_change_of_the_logits_seldom_changes_the_draw():
    logits = _logits(2000, 331)
    changed = logits + 1e-3 * _logits(2000, 331, seed=1)
    keys = torch.ones(2000), torch.arange(2000), torch.arange(2000)
    assert (draw(logits, *keys) != draw(changed, *keys)).float().mean() < 0.01


def test_a_token_without_weight_is_never_drawn():
    logits = torch.full((1, 400), -torch.inf)
    logits[0, [3, 350]] = torch.tensor([0.0, 1.0])
    assert set(_draws(logits, 1.0, 500).tolist()) == {3, 350}


def test_the_lowest_temperature_is_greedy():
    logits = _logits(200, 331)
    tokens = draw(logits, torch.full((200,), 1e5), torch.arange(200), torch.arange(200))
    assert tokens.tolist() == logits.argmax(-1).tolist()


def test_candidates_are_drawn_by_weight():
    count = 20_000
    weights, tokens = torch.tensor([0.5, 0.3, 0.0, 0.2]), torch.tensor([40, 7, 1, 300])
    drawn = draw_candidates(
        weights.expand(count, -1),
        tokens.expand(count, -1),
        torch.full((count,), 1),
        torch.arange(count),
    )
    counts = torch.stack([(drawn == token).sum() for token in (40, 7, 300)])
    assert counts.sum() == count
    assert _chi_square(counts, torch.tensor([0.5, 0.3, 0.2])) < 4


def test_the_order_of_candidates_and_candidates_ruled_out_do_not_matter():
    weights, tokens = torch.tensor([[0.4, 0.3, 0.3]]), torch.tensor([[5, 2, 9]])
    shuffled, ids = torch.tensor([[0.3, 0.0, 0.4, 0.3]]), torch.tensor([[9, 77, 5, 2]])
    for position in range(50):
        key = torch.tensor([3]), torch.tensor([position])
        assert draw_candidates(weights, tokens, *key) == draw_candidates(shuffled, ids, *key)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("k", [1, 20, 64])
def test_largest_equals_topk(vocab, k):
    logits = _logits(4, vocab)
    values, ids = largest(logits, k)
    assert torch.equal(values, logits.topk(min(k, vocab)).values)
    assert torch.equal(logits.gather(1, ids), values)


def test_largest_of_equals_are_different_tokens():
    values, ids = largest(torch.ones(1, 50257), 64)
    assert values.tolist() == [[1.0] * 64]
    assert len(set(ids[0].tolist())) == 64


NON_FINITE_ROWS = {
    "NaN": lambda row: row.fill_(torch.nan),
    "one NaN, the last": lambda row: row[-1:].fill_(torch.nan),
    "one NaN, the first": lambda row: row[:1].fill_(torch.nan),
    "one infinity": lambda row: row[len(row) // 2].fill_(torch.inf),
    "all infinite": lambda row: row.fill_(torch.inf),
    "infinities of both signs": lambda row: row.fill_(-torch.inf)[:1].fill_(torch.inf),
    "only minus infinity": lambda row: row.fill_(-torch.inf),
}


@pytest.mark.parametrize("vocab", [1, 7, 128, 331, 4096])
@pytest.mark.parametrize("spoil", NON_FINITE_ROWS.values(), ids=NON_FINITE_ROWS)
def test_a_non_finite_row_has_no_token_and_other_rows_are_unchanged(spoil, vocab):
    logits = _logits(3, vocab)
    seeds, positions = torch.arange(3), torch.arange(3)
    methods = [argmax, lambda each: draw(each, torch.ones(3), seeds, positions)]
    before = [method(logits).tolist() for method in methods]
    index = torch.arange(vocab).expand(3, -1)
    kept = draw_candidates(logits.softmax(-1), index, seeds, positions).tolist()
    spoil(logits[1])
    for method, (first, _, last) in zip(methods, before, strict=True):
        assert method(logits).tolist() == [first, NON_FINITE, last]
    found = draw_candidates(logits.softmax(-1), index, seeds, positions).tolist()
    assert found == [kept[0], NON_FINITE, kept[2]]


def test_a_logit_of_minus_infinity_only_rules_its_token_out():
    logits = torch.full((1, 300), -torch.inf)
    logits[0, 299] = -3.0
    assert argmax(logits).tolist() == [299]
    seed = position = torch.zeros(1, dtype=torch.int64)
    assert draw(logits, torch.ones(1), seed, position).tolist() == [299]
