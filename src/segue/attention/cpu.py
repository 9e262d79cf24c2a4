"""Attention on the CPU from stock torch operators.

Letters: B sequences, S keys per sequence, H key-value heads, N query heads, G = N / H, D head dimension.

A decode step gathers keys page by page as `[B, S, H * D]` and multiplies them by queries laid out as
`[B, N, H * D]`, each zero outside its own key-value head: multiplying by zeros costs less than gathering keys
head by head. Values are not gathered at all: `embedding_bag` sums rows of the pool, weighted by the
probabilities. Prefill packs the query heads that share a key-value head into the rows of one matrix, and
processes it in blocks of queries, skipping the keys that the causal mask hides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from segue.attention.base import AttentionBackend, AttentionShape, Context
from segue.kernels.fp8 import dequantize_by
from segue.kvcache.pool import KVPool
from segue.sizes import ceil_div, round_up

_KEY_MULTIPLE = 64  # decode pads S to a multiple: oneDNN takes half a millisecond to compile each new shape
_MAX_PADDING = 3072  # tokens of padding per group; about what the calls of one more group cost
_BLOCK = 128  # maximum of query tokens per GEMM in prefill
_MAX_SCORES = 1 << 24  # elements of a GEMM's result: long contexts get blocks of fewer tokens
_SHORT_KEYS = 128  # keys up to which one fused call is faster than the blocked GEMMs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decode:
    """A group of sequences of one query each, padded to the longest."""

    members: Tensor | None  # int64 [B], the sequences' tokens in the step; None: the first B
    num: int  # B
    pages: Tensor  # [B * S / page_size], rows of `_key_pages`, each one page's keys
    value_index: Tensor  # [B * N * S], rows of `_values`
    offsets: Tensor  # [B * N], the index of each query head's first entry in `value_index`
    hidden: Tensor  # bool [B, 1, S], true for keys beyond the sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prefill:
    """One sequence's queries, without those that attend to no key."""

    start: int  # the first query's token in the step
    q_len: int
    kv_len: int
    index: Tensor | None  # [H * S], rows of `_keys` and `_values`; None: all keys are of this step
    mask: Tensor | None  # [q_len, kv_len], 0 or -inf, of a short sequence with kv_len != q_len


class GatheringAttention(AttentionBackend):
    """The pool as rows of one head each, from which the CPU's backends gather keys and values.

    `_keys` and `_values` are these rows, `[*, head_dim]`, by layer: head h of token row r is row r * H + h.
    The same indices serve every layer. `_group` is G, the query heads per key-value head.
    """

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        """Make the backend of a model of `shape` whose cache is `pool`."""
        self._shape = shape
        self._pool = pool
        self._group = shape.num_heads // shape.num_kv_heads
        self._keys = [rows.view(-1, shape.head_dim) for rows in pool.key_rows]
        self._values = [rows.view(-1, shape.head_dim) for rows in pool.value_rows]
        num_rows = pool.data.numel() // shape.head_dim
        self._index_dtype = torch.int32 if num_rows < 2**31 else torch.int64

    def _gather(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the rows `keys` of `_keys` and `values` of `_values`, in the dtype of the model."""
        found = (self._keys[layer].index_select(0, keys), self._values[layer].index_select(0, values))
        if not self._pool.is_fp8:
            return found
        key, value = self._pool.scales[layer]
        dtype = self._pool.dtype
        return dequantize_by(found[0], key, dtype), dequantize_by(found[1], value, dtype)

    @staticmethod
    def _prompts(ctx: Context, num_decode: int) -> Iterator[tuple[int, int, int, int]]:
        """Yields each sequence after `num_decode`: slot, first token in the step, `q_len` and `kv_len`."""
        start = sum(ctx.q_lens[:num_decode])  # the decode rows' tokens come first
        columns = (ctx.slots, ctx.q_lens, ctx.kv_lens)
        for slot, q_len, kv_len in zip(*(each[num_decode:] for each in columns), strict=True):
            yield slot, start, q_len, kv_len
            start += q_len


class CPUAttention(GatheringAttention):
    """Packed GEMMs over gathered keys; `prepare` lays out the indices and masks once per step.

    A plan (`_Decode` or `_Prefill`) is what `prepare` lays out for a group of decode rows, or for one prompt.
    Every layer's `forward` runs all plans.
    """

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        """Make the backend of a model of `shape` whose cache is `pool`."""
        super().__init__(shape, pool)
        heads, size, dtype = shape.num_kv_heads, pool.page_size, pool.dtype
        # By layer: a row has one page's keys or values, and row `page * 2 * num_layers` the page's keys.
        by_page = pool.data.view(-1, size * heads * shape.head_dim)
        self._key_pages = [by_page[2 * layer :] for layer in range(pool.num_layers)]
        # 1 where a query head uses a key-value head, else 0.
        own_head = torch.arange(shape.num_heads)[:, None] // self._group == torch.arange(heads)
        self._own_head = own_head.to(dtype)[:, :, None]  # [N, H, 1]
        self._zero = torch.zeros(1, dtype=dtype)
        # The causal mask of a block's queries over the keys of the same tokens: 0 or -inf.
        columns = torch.arange(_BLOCK)
        rows = columns.repeat_interleave(self._group)[:, None]  # a token's query heads are adjacent rows
        self._triangle = torch.zeros(len(rows), _BLOCK, dtype=dtype).masked_fill_(
            columns > rows, float("-inf")
        )
        self._decodes: list[_Decode] = []
        self._prefills: list[_Prefill] = []
        self._has_blind_queries = False

    def prepare(self, ctx: Context) -> None:
        """Group the decode rows by length and lay out all indices and masks."""
        # `embedding_bag` cannot read FP8: with it, decode rows are prompts of one token.
        num_decode = 0 if self._pool.is_fp8 else ctx.num_decode
        groups = group_by_length(ctx.kv_lens[:num_decode])
        self._decodes = [self._plan_decode(ctx, members, alone=len(groups) == 1) for members in groups]
        self._prefills = list(self._plan_prefills(ctx, num_decode))
        # Queries that attend to no key, whose output is 0: no plan has them.
        self._has_blind_queries = any(q > kv for q, kv in zip(ctx.q_lens, ctx.kv_lens, strict=True))

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, layer: int, ctx: Context
    ) -> Tensor:
        """Attend for all sequences, plan by plan; see `AttentionBackend.forward`."""
        assert key is not None and value is not None
        if len(self._decodes) == 1 and not self._prefills:
            return self._decode(query, self._decodes[0], layer)
        output = torch.zeros_like(query) if self._has_blind_queries else query.new_empty(query.shape)
        for decode in self._decodes:
            if decode.members is None:
                output[: decode.num] = self._decode(query[: decode.num], decode, layer)
            else:
                output[decode.members] = self._decode(query[decode.members], decode, layer)
        for prefill in self._prefills:
            tokens = slice(prefill.start, prefill.start + prefill.q_len)
            if prefill.index is None:  # no cached prefix: all keys and values are at hand, none is gathered
                keys, values = key[tokens].transpose(0, 1), value[tokens].transpose(0, 1)
            else:
                shape = (self._shape.num_kv_heads, prefill.kv_len, self._shape.head_dim)
                found = self._gather(layer, prefill.index, prefill.index)
                keys, values = (each.view(shape) for each in found)
            if prefill.kv_len <= _SHORT_KEYS:
                self._prefill_short(query[tokens], keys, values, prefill, output[tokens])
            else:
                self._prefill_blocked(query[tokens], keys, values, prefill, output[tokens])
        return output

    def _decode(self, query: Tensor, plan: _Decode, layer: int) -> Tensor:
        """Attend for a group of decode rows: `query` and the result are `[B, N, D]`.

        `spread` holds the scaled queries, each zero outside its own key-value head.
        """
        shape = self._shape
        width = shape.num_kv_heads * shape.head_dim
        keys = self._key_pages[layer].index_select(0, plan.pages).view(plan.num, -1, width)
        spread = torch.addcmul(self._zero, query[:, :, None], self._own_head, value=shape.scale)
        scores = torch.bmm(spread.view(plan.num, shape.num_heads, width), keys.transpose(1, 2))
        scores.masked_fill_(plan.hidden, float("-inf"))
        weights = torch.softmax(scores, -1).view(-1)
        # The bare arguments: no scaling by frequency, mode 0 (sum), no sparse gradient.
        summed = torch.embedding_bag(
            self._values[layer], plan.value_index, plan.offsets, False, 0, False, weights
        )[0]
        return summed.view(query.shape)

    def _prefill_short(
        self, query: Tensor, keys: Tensor, values: Tensor, plan: _Prefill, output: Tensor
    ) -> None:
        """Attend for one prompt of few keys by one fused call, into `output`.

        `query` and `output` are `[q_len, N, D]`, `keys` and `values` `[H, kv_len, D]`.
        """
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys[None],
            values[None],
            plan.mask,
            is_causal=plan.mask is None,
            scale=self._shape.scale,
            enable_gqa=True,
        )
        output.copy_(attended[0].transpose(0, 1))

    def _prefill_blocked(
        self, query: Tensor, keys: Tensor, values: Tensor, plan: _Prefill, output: Tensor
    ) -> None:
        """Attend for one prompt of many keys, a block of queries at a time, into `output`.

        `query` and `output` are `[q_len, N, D]`, `keys` and `values` `[H, kv_len, D]`. A block reads only the
        keys up to its last query's own (`visible`). Of these only the last `size` ones need a mask.
        """
        shape, group = self._shape, self._group
        grouped = (plan.q_len, shape.num_kv_heads, group, shape.head_dim)
        queries = query.view(grouped).transpose(0, 1)  # [H, T, G, D]
        outputs = output.view(grouped).transpose(0, 1)
        block = min(_BLOCK, max(1, _MAX_SCORES // (shape.num_heads * plan.kv_len)))
        for start in range(0, plan.q_len, block):
            size = min(block, plan.q_len - start)
            visible = plan.kv_len - plan.q_len + start + size
            packed = query.new_empty(shape.num_kv_heads, size, group, shape.head_dim)
            torch.mul(queries[:, start : start + size], shape.scale, out=packed)
            scores = torch.bmm(packed.flatten(1, 2), keys[:, :visible].transpose(1, 2))
            scores[..., visible - size :].add_(self._triangle[: size * group, :size])
            attended = torch.bmm(torch.softmax(scores, -1), values[:, :visible])
            outputs[:, start : start + size] = attended.view(packed.shape)

    def _plan_decode(self, ctx: Context, members: Sequence[int], *, alone: bool) -> _Decode:
        """Lay out the indices and the mask of one group of decode rows.

        `members` are the group's indices among the decode rows. With `alone` there is no other group, so
        `forward` takes the first B tokens by a slice and needs no index.
        """
        num, heads, size = len(members), self._shape.num_kv_heads, self._pool.page_size
        lens = torch.tensor([ctx.kv_lens[m] for m in members])[:, None]
        max_len = max(ctx.kv_lens[m] for m in members)
        num_pages = ceil_div(round_up(max_len, _KEY_MULTIPLE), size)
        pages = ctx.page_table.data[[ctx.slots[m] for m in members], :num_pages].long()
        rows = (pages[:, :, None] * self._pool.page_rows + torch.arange(size)).flatten(1)  # token rows [B, S]
        hidden = torch.arange(rows.shape[1]) >= lens
        # A hidden key gets the value row of a real token: 0 times NaN in an unused row would be NaN.
        rows = torch.where(hidden, rows[:, :1], rows)
        index = (rows[:, None] * heads + torch.arange(heads)[:, None]).to(self._index_dtype)  # [B, H, S]
        value_index = index[:, :, None].expand(-1, -1, self._group, -1).reshape(-1)
        return _Decode(
            members=None if alone else torch.tensor(members),
            num=num,
            pages=(pages * (2 * self._pool.num_layers)).view(-1).to(self._index_dtype),
            value_index=value_index,
            offsets=torch.arange(0, value_index.numel(), rows.shape[1], dtype=self._index_dtype),
            hidden=hidden[:, None],
        )

    def _plan_prefills(self, ctx: Context, num_decode: int) -> Iterator[_Prefill]:
        """Yields the plan of each sequence after `num_decode`, without the queries that attend to no key.

        Keys are gathered only where some are of earlier steps. A short sequence gets a mask, except where it
        is the plain causal one, which the fused call has built in.
        """
        for slot, start, q_len, kv_len in self._prompts(ctx, num_decode):
            num_seeing = min(q_len, kv_len)  # with more queries than keys, the first ones attend to no key
            if not num_seeing:
                continue
            index, mask = None, None
            if kv_len != q_len:
                heads = torch.arange(self._shape.num_kv_heads)[:, None]
                rows = self._token_rows(ctx, slot, kv_len) * self._shape.num_kv_heads + heads
                index = rows.to(self._index_dtype).view(-1)
            if kv_len != num_seeing and kv_len <= _SHORT_KEYS:
                mask = torch.zeros(num_seeing, kv_len, dtype=self._pool.dtype)
                queries = torch.arange(num_seeing)[:, None]
                mask.masked_fill_(torch.arange(kv_len) > queries + kv_len - num_seeing, float("-inf"))
            yield _Prefill(
                start=start + q_len - num_seeing, q_len=num_seeing, kv_len=kv_len, index=index, mask=mask
            )

    def _token_rows(self, ctx: Context, slot: int, length: int) -> Tensor:
        """Returns the pool's token rows of the slot's first `length` tokens, int64 `[1, length]`."""
        size = self._pool.page_size
        pages = ctx.page_table.data[[slot], : ceil_div(length, size)].long()
        return (pages[:, :, None] * self._pool.page_rows + torch.arange(size)).flatten(1)[:, :length]


def group_by_length(lens: Sequence[int]) -> list[list[int]]:
    """Group sequences of similar length, so that padding each group to its longest wastes little.

    `lens` are the sequences' numbers of keys. Returns each group's indices in `lens`, ascending. A group ends
    where one more sequence would bring its padding above `_MAX_PADDING` tokens.
    """
    groups: list[list[int]] = []
    max_len = padding = 0
    for member in sorted(range(len(lens)), key=lambda m: -lens[m]):
        padding += max_len - lens[member]
        if not groups or padding > _MAX_PADDING:
            groups.append([])
            max_len, padding = lens[member], 0
        groups[-1].append(member)
    return [sorted(group) for group in groups]
