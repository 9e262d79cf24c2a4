"""Counter-based random numbers: exact bits, and the right distribution."""

import math

import torch

from segue.sampling.gumbel_max import gumbel, hash64

MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def _expected(seed: int, position: int, counter: int) -> int:
    step = 0x9E3779B97F4A7C15
    key = _mix((_mix(seed & MASK) + position * step) & MASK)
    return _mix((key + (counter + 1) * step) & MASK)


def _column(*values: int) -> torch.Tensor:
    return torch.tensor(values)[:, None]


def test_bits_equal_those_of_exact_integer_arithmetic():
    seeds, positions, counters = [0, 1, -5, 2**63 - 1], [0, 17, 8191, 3], [0, 1, 2, 49151]
    bits = hash64(_column(*seeds), _column(*positions), torch.tensor(counters))
    for i, row in enumerate(bits.tolist()):
        assert [value & MASK for value in row] == [_expected(seeds[i], positions[i], c) for c in counters]


def test_neighbouring_keys_have_different_bits():
    keys = [(seed, position) for seed in range(40) for position in range(40)]
    seeds, positions = zip(*keys, strict=True)
    bits = hash64(_column(*seeds), _column(*positions), torch.arange(40))
    assert len(set(bits.flatten().tolist())) == 40**3


def test_every_bit_is_uniform_and_independent_of_the_others():
    count = 1 << 16
    bits = hash64(_column(3), _column(5), torch.arange(count)).squeeze(0)
    ones = torch.stack([(bits >> shift) & 1 for shift in range(64)]).double()
    assert (ones.mean(-1) - 0.5).abs().max() < 5 * 0.5 / math.sqrt(count)
    correlation = torch.corrcoef(ones) - torch.eye(64)
    assert correlation.abs().max() < 6 / math.sqrt(count)


def test_noise_follows_the_gumbel_distribution():
    noise = gumbel(_column(11), _column(0), torch.arange(200_000)).squeeze(0).sort().values
    distribution = torch.exp(-torch.exp(-noise))
    distance = (distribution - torch.arange(len(noise)) / len(noise)).abs().max()
    assert distance < 1.95 / math.sqrt(len(noise))  # Kolmogorov-Smirnov at 0.1 %


def test_successive_positions_are_uncorrelated():
    noise = gumbel(torch.zeros(20_000, 1, dtype=torch.int64), torch.arange(20_000)[:, None], torch.arange(2))
    pairs = torch.stack([noise[:-1, 0], noise[1:, 0], noise[:-1, 1]])
    assert (torch.corrcoef(pairs) - torch.eye(3)).abs().max() < 4 / math.sqrt(20_000)
