"""Routing on the device: each token's experts, and the (token, expert) pairs sorted by expert.

Pair p is token p // k with its (p % k)-th expert. The host reads no values: sizes are those of the worst
case, and the table of tiles marks the tiles that are not used. Expert E (the number of experts) stands for
none. In the kernels, EP and KP are powers of two that hold all experts, and the k experts of a token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from segue.kernels.triton.launch import launch_options, pdl_launch_dependents, pdl_wait
from segue.sizes import ceil_div, next_power_of_2

_TOKENS = tl.constexpr(4)  # tokens per program of `_route`
_CHUNK = tl.constexpr(2048)  # pairs that a program counts at a time
CHUNK = _CHUNK.value  # more pairs than these are counted by a kernel of its own
_PAIRS = tl.constexpr(128)  # pairs that a program of `_sort` puts in their places; a divisor of `_CHUNK`
_TILES = tl.constexpr(64)  # entries of the table of tiles that a program of `_sort` writes at a time
_CHUNKS = tl.constexpr(16)  # chunks whose counts a program of `_sort` adds up at a time


@triton.jit(do_not_specialize=["num_tokens"])
def _route(
    logits,
    num_unpadded,
    weights,
    experts,
    num_tokens,
    num_experts,
    K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    EP: tl.constexpr,
    KP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose the experts of _TOKENS tokens, see `segue.kernels.ops.route`: take the largest logit K times."""
    t = tl.program_id(0) * _TOKENS + tl.arange(0, _TOKENS)
    e, j = tl.arange(0, EP), tl.arange(0, KP)
    inside = t < num_tokens
    pdl_wait(PDL)
    x = tl.load(
        logits + t[:, None].to(tl.int64) * num_experts + e[None, :],
        mask=inside[:, None] & (e[None, :] < num_experts),
        other=float("-inf"),
    ).to(tl.float32)
    real = inside
    if num_unpadded is not None:
        real = inside & (t < tl.load(num_unpadded))
    pdl_launch_dependents(PDL)
    left = tl.where(x == x, x, float("-inf"))  # a token with NaN gets some experts, with weights NaN
    top = tl.max(left, 1)
    total = tl.sum(tl.exp(x - top[:, None]), 1)
    chosen = tl.zeros((_TOKENS, KP), tl.int32)
    weight = tl.zeros((_TOKENS, KP), tl.float32)
    for i in tl.static_range(K):
        best, at = tl.max(left, 1, return_indices=True)  # of equal logits the lowest expert's
        chosen = tl.where(j[None, :] == i, at[:, None], chosen)
        weight = tl.where(j[None, :] == i, (tl.exp(best - top) / total)[:, None], weight)
        left = tl.where(e[None, :] == at[:, None], float("-inf"), left)
    if RENORMALISE:
        weight = weight / tl.sum(weight, 1)[:, None]
    to = t[:, None].to(tl.int64) * K + j[None, :]
    mine = inside[:, None] & (j[None, :] < K)
    tl.store(weights + to, tl.where(real[:, None], weight, 0.0), mask=mine)
    tl.store(experts + to, tl.where(real[:, None], chosen, num_experts), mask=mine)


@triton.jit
def _count_chunk(experts, start, end, num_experts, EP: tl.constexpr):
    """Returns how many of the pairs from `start` to `end` each expert has, `[EP]`: at most _CHUNK pairs."""
    i = start + tl.arange(0, _CHUNK)
    expert = tl.load(experts + i, mask=i < end, other=num_experts).to(tl.int32)
    known = expert < num_experts
    return tl.histogram(tl.where(known, expert, 0), EP, mask=known)


@triton.jit(do_not_specialize=["num_pairs"])
def _count(experts, counted, num_pairs, num_experts, EP: tl.constexpr, PDL: tl.constexpr):
    """Store each expert's number of pairs in one chunk, into `counted` `[chunks, EP]`, for `_sort`."""
    chunk = tl.program_id(0)
    pdl_wait(PDL)
    counts = _count_chunk(experts, chunk * _CHUNK, num_pairs, num_experts, EP)
    pdl_launch_dependents(PDL)
    tl.store(counted + chunk * EP + tl.arange(0, EP), counts)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _sort(
    experts,
    counted,
    order,
    tiles,
    num_pairs,
    num_tiles,
    num_experts,
    BM: tl.constexpr,
    EP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Put _PAIRS pairs in their places of `order`, and write some entries of `tiles`; see `sort`.

    A pair's place is where its expert's pairs start, plus the number of the expert's pairs before it: in
    earlier chunks (`counted`), in this chunk before this program's pairs, and among these. `counted` is None
    if there is only one chunk. Every program derives the starts from all counts, and writes its share of the
    table of tiles of BM pairs.
    """
    first = tl.program_id(0) * _PAIRS
    e, p, c = tl.arange(0, EP), first + tl.arange(0, _PAIRS), tl.arange(0, _CHUNKS)
    pdl_wait(PDL)
    before = _count_chunk(experts, first // _CHUNK * _CHUNK, first, num_experts, EP)
    if counted is not None:
        counts = tl.zeros((EP,), tl.int32)
        for i in range(0, tl.cdiv(num_pairs, _CHUNK), _CHUNKS):
            chunk = i + c[:, None]
            found = tl.load(counted + chunk * EP + e[None, :], mask=chunk * _CHUNK < num_pairs, other=0)
            counts += tl.sum(found, 0)
            before += tl.sum(tl.where(chunk < first // _CHUNK, found, 0), 0)
    else:
        counts = _count_chunk(experts, 0, num_pairs, num_experts, EP)
    mine = tl.load(experts + p, mask=p < num_pairs, other=num_experts).to(tl.int32)
    pdl_launch_dependents(PDL)
    starts = tl.cumsum(counts, 0) - counts
    same = (mine[:, None] == mine[None, :]) & (p[:, None] > p[None, :])
    to = tl.gather(starts + before, tl.minimum(mine, EP - 1), 0) + tl.sum(same.to(tl.int32), 1)
    tl.store(order + to, p, mask=mine < num_experts)
    needed = tl.cdiv(counts, BM)
    ends = tl.cumsum(needed, 0)
    for i in range(tl.program_id(0) * _TILES, num_tiles, tl.num_programs(0) * _TILES):
        tile = i + tl.arange(0, _TILES)
        found_at = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), 1)
        bin = tl.minimum(found_at, EP - 1)
        row = (tile - tl.gather(ends - needed, bin, 0)) * BM
        there = tile < num_tiles
        tl.store(tiles + tile, tl.where(found_at < EP, found_at, -1), mask=there)
        tl.store(tiles + num_tiles + tile, tl.gather(starts, bin, 0) + row, mask=there)
        rows = tl.minimum(tl.gather(counts, bin, 0) - row, BM)
        tl.store(tiles + 2 * num_tiles + tile, rows, mask=there)


def route(
    logits: Tensor, per_token: int, *, renormalise: bool, num_unpadded: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `segue.kernels.ops.route`; among equal logits the lowest expert wins. Experts are int32."""
    num_tokens, num_experts = logits.shape
    weights = torch.empty((num_tokens, per_token), dtype=torch.float32, device=logits.device)
    experts = torch.empty((num_tokens, per_token), dtype=torch.int32, device=logits.device)
    _route[(ceil_div(num_tokens, _TOKENS.value),)](
        logits=logits,
        num_unpadded=num_unpadded,
        weights=weights,
        experts=experts,
        num_tokens=num_tokens,
        num_experts=num_experts,
        K=per_token,
        RENORMALISE=renormalise,
        EP=next_power_of_2(num_experts),
        KP=next_power_of_2(per_token),
        **launch_options(4, num_tokens),
    )
    return weights, experts


def sort(experts: Tensor, num_experts: int, block: int) -> tuple[Tensor, Tensor]:
    """Sort the pairs of `experts` `[T, k]` by expert and split each expert's pairs into tiles of `block`.

    Returns:
        order: int32 `[T * k]`, the pairs by expert, then by pair. Pairs of expert `num_experts` are left out,
            and as many entries at the end are undefined.
        tiles: int32 `[3, tiles]`, as many as in the worst case: the expert (-1: tile not used), the index of
            the tile's first pair in `order`, and the number of its pairs.
    """
    (num_tokens, _), num_pairs = experts.shape, experts.numel()
    bins, num_chunks = max(32, next_power_of_2(num_experts)), ceil_div(num_pairs, _CHUNK.value)
    counted = None
    if num_chunks > 1:
        counted = torch.empty((num_chunks, bins), dtype=torch.int32, device=experts.device)
        _count[(num_chunks,)](
            experts=experts,
            counted=counted,
            num_pairs=num_pairs,
            num_experts=num_experts,
            EP=bins,
            **launch_options(8, num_tokens),
        )
    # The worst case: as many experts as possible have a pair, and so a tile that is not full.
    busy = min(num_experts, num_pairs)
    num_tiles = busy + (num_pairs - busy) // block
    order = torch.empty(num_pairs, dtype=torch.int32, device=experts.device)
    tiles = torch.empty((3, num_tiles), dtype=torch.int32, device=experts.device)
    _sort[(ceil_div(num_pairs, _PAIRS.value),)](
        experts=experts,
        counted=counted,
        order=order,
        tiles=tiles,
        num_pairs=num_pairs,
        num_tiles=num_tiles,
        num_experts=num_experts,
        BM=block,
        EP=bins,
        **launch_options(8, num_tokens),
    )
    return order, tiles
