"""A 64-bit checksum of a tensor's bytes, the same on every device."""

import torch
from torch import Tensor

MASK = (1 << 64) - 1  # turns an int64 into an unsigned number

# 8-byte words per block. On CPU a block stays in a core's cache, and is too small for several threads.
_WORDS = 1 << 15
_WORDS_CUDA = 1 << 20
_FACTOR = 0x1E3779B97F4A7C15  # odd, so that multiplication loses no information


def digest(tensor: Tensor) -> Tensor:
    """Return the checksum of the contiguous `tensor`: an int64 scalar, on the device of the tensor.

    It depends on the bytes and their positions: it is the sum of all 8-byte words, each hashed and multiplied
    by the hash of its position. The last word is padded with zeros. The words are read in blocks, so that
    temporaries take little memory: up to 32 MiB on CUDA.
    """
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    step = 8 * (_WORDS_CUDA if raw.is_cuda else _WORDS)
    positions = torch.arange(min(step, raw.numel() + 7) // 8, dtype=torch.int64, device=raw.device)
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    for start in range(0, raw.numel(), step):
        words = _words(raw[start : start + step])
        # The factors are odd, so that no change of a word is lost in its product.
        weights = scramble(positions[: words.numel()] + start // 8).bitwise_or_(1)
        total += scramble(words).mul_(weights).sum()
    return total


def scramble(words: Tensor) -> Tensor:
    """Hash each of the int64 numbers in place, and return them."""
    # Integer overflow wraps in the same way on all devices. The shift mixes the high bits into the low ones.
    words.mul_(_FACTOR)
    return words.bitwise_xor_(words >> 32)


def _words(raw: Tensor) -> Tensor:
    """Return a copy of the bytes `raw` as int64 words. Unlike `raw`, the copy is always aligned to words.

    The copy may also be overwritten, as `scramble` does.
    """
    missing = -raw.numel() % 8
    return (torch.cat([raw, raw.new_zeros(missing)]) if missing else raw.clone()).view(torch.int64)
