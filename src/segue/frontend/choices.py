"""The choices of a prompt, ``n`` in OpenAI's API: how many there may be, and the seed of each."""

from __future__ import annotations

MAX_CHOICES = 128  # of one prompt
SEED_LIMIT = 1 << 63
_MASK = (1 << 64) - 1
# SplitMix64 (Steele, Lea, Flood 2014): a Weyl sequence with this increment, hashed with these multipliers.
_INCREMENT, _MULTIPLIER_1, _MULTIPLIER_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of a choice, 63 bits, from the seed of its request, 63 bits, and its number from 0.

    The first choice has the request's own seed, so it is what a request for one choice generates. The seeds
    of the others are hashed: the choices of a request with the next seed are not the same ones, shifted.
    """
    if choice == 0:
        return seed
    x = (seed + choice * _INCREMENT) & _MASK
    x = ((x ^ (x >> 30)) * _MULTIPLIER_1) & _MASK
    x = ((x ^ (x >> 27)) * _MULTIPLIER_2) & _MASK
    return (x ^ (x >> 31)) % SEED_LIMIT
