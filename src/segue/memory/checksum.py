"""A 64-bit number for a tensor's bytes, the same on every device."""

import torch
from torch import Tensor

MASK = (1 << 64) - 1  # of an int64 as an unsigned number

# 8-byte words taken at once. On CPU what is small stays in a core's cache and is no work for several threads.
_WORDS = 1 << 15
_WORDS_CUDA = 1 << 20
_FACTOR = 0x1E3779B97F4A7C15  # odd: multiplying loses nothing


def digest(tensor: Tensor) -> Tensor:
    """An int64 scalar beside the contiguous `tensor`, sensitive to its bytes and their places.

    A last word that is not full counts as if zeros followed. Temporaries take up to 32 MiB on CUDA.
    """
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    step = 8 * (_WORDS_CUDA if raw.is_cuda else _WORDS)
    places = torch.arange(min(step, raw.numel() + 7) // 8, dtype=torch.int64, device=raw.device)
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    for start in range(0, raw.numel(), step):
        words = _words(raw[start : start + step])
        weights = scramble(places[: words.numel()] + start // 8).bitwise_or_(1)
        total += scramble(words).mul_(weights).sum()
    return total


def scramble(words: Tensor) -> Tensor:
    """Hash int64 numbers in place."""
    # Integer arithmetic wraps alike everywhere. The shift lets the high bits count as much as the low ones.
    words.mul_(_FACTOR)
    return words.bitwise_xor_(words >> 32)


def _words(raw: Tensor) -> Tensor:
    """A copy, which begins where a word may, unlike some `raw`."""
    missing = -raw.numel() % 8
    return (torch.cat([raw, raw.new_zeros(missing)]) if missing else raw.clone()).view(torch.int64)
