"""Sampling with top-k, top-p or min-p, a part of the kernel that chooses a row's token.

Each filter keeps the likeliest tokens down to a threshold logit, tokens equal to the threshold included. So a
row's tokens need no sorting: one program searches for the threshold, dividing its range by four in each pass,
and then draws among the tokens kept by Gumbel-max with noise per token, as
`segue.sampling.gumbel_max.draw_candidates` does. A row is read about 25 times, mostly from the cache. Logits
are compared as integer keys in the same order, so that a search over all keys ends after about 16 passes.
"""

import triton
import triton.language as tl

from segue.kernels.triton.gumbel_noise import gumbel

WARPS = 16  # per program
REGISTERS = 64  # per thread at most: two programs fit a multiprocessor, so those of 256 rows run together
_BLOCK = tl.constexpr(4096)
# Noise, which is most of the work, is computed only for blocks with a token kept.
_DRAW_BLOCK = tl.constexpr(1024)


@triton.jit
def _load_logits(logits, token, vocab_size):
    """Load logits; NaN becomes minus infinity. A row with NaN gets no token in the end, whatever is drawn."""
    x = tl.load(logits + token, mask=token < vocab_size, other=float("-inf"))
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def _sort_key(x):
    """Returns int32 keys that are in the order of the logits, float32."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _relative_weight(x, top, inverse):
    """Returns weights relative to that of the likeliest token."""
    return tl.exp((x - top) * inverse)


@triton.jit
def _find_threshold(logits, top, inverse, vocab_size, target, low, BY_WEIGHT: tl.constexpr):
    """Returns the largest key >= `low` for which at least `target` tokens have that key or more.

    With BY_WEIGHT, their total weight is compared with `target`, not their number. The result is always in
    [`low`, `high`), and each pass counts what lies above three keys that divide this range. `top` is the
    row's largest logit.
    """
    high = _sort_key(top).to(tl.int64) + 1
    while high - low > 1:
        width = high - low
        a, b, c = low + width // 4, low + width // 2, high - 1 - (width - 1) // 4
        above_a = tl.zeros((_BLOCK,), tl.float32)
        above_b = tl.zeros((_BLOCK,), tl.float32)
        above_c = tl.zeros((_BLOCK,), tl.float32)
        for start in range(0, vocab_size, _BLOCK):
            x = _load_logits(logits, start + tl.arange(0, _BLOCK), vocab_size)
            key = _sort_key(x)
            value = _relative_weight(x, top, inverse) if BY_WEIGHT else tl.full((_BLOCK,), 1.0, tl.float32)
            above_a += tl.where(key >= a.to(tl.int32), value, 0.0)
            above_b += tl.where(key >= b.to(tl.int32), value, 0.0)
            above_c += tl.where(key >= c.to(tl.int32), value, 0.0)
        enough_a = tl.sum(above_a.to(tl.float64), 0) >= target
        enough_b = tl.sum(above_b.to(tl.float64), 0) >= target
        enough_c = tl.sum(above_c.to(tl.float64), 0) >= target
        high = tl.where(enough_c, high, tl.where(enough_b, c, tl.where(enough_a, b, a)))
        low = tl.where(enough_c, c, tl.where(enough_b, b, tl.where(enough_a, a, low)))
    return low


@triton.jit
def draw_filtered(logits, position, inverse, seed, top_k, top_p, min_p, vocab_size):
    """Returns a token drawn from one row, int32; -1 if the row has no temperature or no filter.

    Filters apply after the temperature, as `segue.sampling.top_k_top_p.candidates` defines. The tokens kept
    have at least the key `low` and the weight `min_p`: top-k raises `low` first, then top-p does.

    `logits` points to the row. The other arguments are the row's values of those of
    `segue.kernels.triton.sampling.sample_plain`; `inverse` is the inverse temperature.
    """
    filtered = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
    drawn = tl.full((), -1, tl.int32)
    if filtered & (inverse > 0.0):
        highest = tl.full((_BLOCK,), float("-inf"), tl.float32)
        for start in range(0, vocab_size, _BLOCK):
            highest = tl.maximum(highest, _load_logits(logits, start + tl.arange(0, _BLOCK), vocab_size))
        top = tl.max(highest, 0)
        low = tl.full((), -(1 << 31), tl.int64)
        if (top_k > 0) & (top_k < vocab_size):
            low = _find_threshold(logits, top, inverse, vocab_size, top_k.to(tl.float64), low, False)
        if top_p < 1.0:
            sums = tl.zeros((_BLOCK,), tl.float32)
            for start in range(0, vocab_size, _BLOCK):
                x = _load_logits(logits, start + tl.arange(0, _BLOCK), vocab_size)
                sums += tl.where(_sort_key(x) >= low, _relative_weight(x, top, inverse), 0.0)
            target = tl.sum(sums.to(tl.float64), 0) * top_p.to(tl.float64)
            low = _find_threshold(logits, top, inverse, vocab_size, target, low, True)
        best = tl.full((_DRAW_BLOCK,), float("-inf"), tl.float64)
        chosen = tl.full((_DRAW_BLOCK,), 2147483647, tl.int32)
        for start in range(0, vocab_size, _DRAW_BLOCK):
            token = start + tl.arange(0, _DRAW_BLOCK)
            x = _load_logits(logits, token, vocab_size)
            weight = _relative_weight(x, top, inverse)
            kept = (_sort_key(x) >= low) & (weight >= min_p) & (weight > 0.0)
            if tl.max(kept.to(tl.int32), 0) > 0:
                score = tl.log(weight.to(tl.float64)) + gumbel(seed, position, token)
                better = kept & (score > best)
                best = tl.where(better, score, best)
                chosen = tl.where(better, token, chosen)
        drawn = tl.min(tl.where(best == tl.max(best, 0), chosen, 2147483647), 0)
        drawn = tl.minimum(drawn, vocab_size - 1)  # no token is kept if all logits are NaN
    return drawn
