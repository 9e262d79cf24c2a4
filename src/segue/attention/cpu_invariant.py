"""Batch-invariant attention on the CPU: neither its step nor earlier steps change a query's bits.

Letters: B sequences of t query tokens each, S keys, H key-value heads, G query heads per key-value head, D
head dimension, R rows of a GEMM.

Decode and prefill are one computation; they differ in how many tokens share a GEMM. Keys and values always
come from the pool. The softmax is over a whole row. Values are summed within blocks of `_BLOCK` keys at fixed
positions, then over the blocks from left to right; hidden keys, and keys that only fill a block, add zeros.
GEMMs have only a few numbers of rows, which are tested beforehand: see `kernels.batch_invariant`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from segue.attention import cpu
from segue.attention.base import AttentionShape, Context
from segue.errors import ConfigError
from segue.kernels.batch_invariant import cancelling_inputs
from segue.kvcache.pool import KVPool
from segue.sizes import round_up

_BLOCK = 64  # keys
_ROWS = (8, 16, 64, 384)  # candidate numbers of rows per GEMM: the query heads of some tokens, and padding
_MAX_SCORES = 1 << 24  # elements of a GEMM's result


@dataclass(frozen=True, slots=True, kw_only=True)
class _QueryTile:
    """What shares a batched GEMM: some query tokens of one sequence, or one query token each of many."""

    tokens: Tensor  # int64 [B * t], indices in the step
    num: int  # B
    rows: int  # R
    key_index: Tensor  # [B * H * S], rows of `_keys`
    value_index: Tensor  # [S / _BLOCK * B * H * _BLOCK], rows of `_values`
    common: int  # number of keys that every query attends to
    hidden: Tensor  # bool [B, 1, 1 or R, S - common], true for keys that a query does not attend to


class InvariantCPUAttention(cpu.GatheringAttention):
    """GEMMs of few shapes over gathered keys; `prepare` lays out the indices and masks once per step.

    It splits the step into tiles (`_QueryTile`), and every layer's `forward` runs all of them. `_rows` are
    the numbers of rows that a GEMM may have, ascending. A tile has one of them; zero rows fill it up.
    """

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        """Make the backend of a model of `shape` whose cache is `pool`.

        Raises:
            ConfigError: on this CPU the bits of such GEMMs depend on their number or their length.
        """
        super().__init__(shape, pool)
        self._rows = _agreeing_rows(self._group, shape.head_dim, pool.dtype)
        self._tiles: list[_QueryTile] = []

    def prepare(self, ctx: Context) -> None:
        """Split the step into tiles and lay out all indices and masks."""
        self._tiles = [*self._plan_decodes(ctx), *self._plan_prefills(ctx)]

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, layer: int, ctx: Context
    ) -> Tensor:
        """Attend for all sequences, tile by tile; see `AttentionBackend.forward`.

        `key` and `value` are not read, since keys and values always come from the pool. The output starts as
        0, which is that of queries that attend to no key.
        """
        output = torch.zeros_like(query, memory_format=torch.contiguous_format)
        for tile in self._tiles:
            output[tile.tokens] = self._attend(query[tile.tokens], tile, layer)
        return output

    def _attend(self, query: Tensor, tile: _QueryTile, layer: int) -> Tensor:
        """Attend for one tile: `query` and the result are `[B * t, G * H, D]`.

        The steps are the scores of all keys, a softmax over the whole row, the weighted sums of the values in
        each block of `_BLOCK` keys (`parts`), and their sum from left to right in float32.
        """
        heads, size, tokens = self._shape.num_kv_heads, self._shape.head_dim, len(query) // tile.num
        by_token = (tile.num, heads, tokens, self._group, size)  # a token's query heads are adjacent rows
        real = slice(0, tokens * self._group)  # the rows that are not padding
        packed = query.new_zeros(tile.num, heads, tile.rows, size)
        queries = query.view(tile.num, tokens, heads, self._group, size).transpose(1, 2)
        torch.mul(queries, self._shape.scale, out=packed[:, :, real].view(by_token))
        keys, values = self._gather(layer, tile.key_index, tile.value_index)
        keys = keys.view(tile.num * heads, -1, size)
        scores = torch.bmm(packed.flatten(0, 1), keys.transpose(1, 2)).view(tile.num, heads, tile.rows, -1)
        scores[..., tile.common :].masked_fill_(tile.hidden, float("-inf"))
        blocks = torch.softmax(scores, -1).view(tile.num * heads, tile.rows, -1, _BLOCK)
        weights = blocks.permute(2, 0, 1, 3).reshape(-1, tile.rows, _BLOCK)
        parts = torch.bmm(weights, values.view(len(weights), _BLOCK, size))
        parts = parts.view(-1, tile.num, heads, tile.rows, size)
        total = parts[0].float()
        for part in parts[1:]:
            total.add_(part)
        attended = total[:, :, real].view(by_token).transpose(1, 2).to(query.dtype)
        return attended.reshape(query.shape)

    def _plan_decodes(self, ctx: Context) -> Iterator[_QueryTile]:
        """Yields the tiles of the decode rows: sequences of similar length, in the fewest rows per GEMM."""
        rows = self._rows[0]
        for members in cpu.group_by_length(ctx.kv_lens[: ctx.num_decode]):
            max_len = max(ctx.kv_lens[member] for member in members)
            per_tile = self._max_rows(max_len) // rows  # sequences, each of which takes `rows` rows
            for start in range(0, len(members), per_tile):
                some = members[start : start + per_tile]
                lens = [ctx.kv_lens[member] for member in some]
                num_visible = torch.tensor(lens)[:, None]
                yield self._tile(
                    ctx, torch.tensor(some), [ctx.slots[m] for m in some], lens, rows, num_visible
                )

    def _plan_prefills(self, ctx: Context) -> Iterator[_QueryTile]:
        """Yields the tiles of each sequence after the decode rows: `per_tile` query tokens each.

        Queries that attend to no key are left out. `num_visible` is each row's number of keys, that of the
        last token for the rows that fill the tile up.
        """
        for slot, start, q_len, kv_len in self._prompts(ctx, ctx.num_decode):
            fitting = [rows for rows in self._rows if rows <= self._max_rows(kv_len)]
            per_tile = max(fitting, default=self._rows[0]) // self._group
            end = start + q_len
            for first in range(end - min(q_len, kv_len), end, per_tile):  # tokens that attend to a key
                count = min(per_tile, end - first)
                last = kv_len - (end - first) + count  # number of keys that the tile's last token attends to
                rows = min(rows for rows in self._rows if rows >= count * self._group)
                num_visible = torch.arange(last - count + 1, last + 1).repeat_interleave(self._group)
                num_visible = torch.cat(
                    [num_visible, num_visible.new_full((rows - len(num_visible),), last)]
                )[None]
                yield self._tile(ctx, torch.arange(first, first + count), [slot], [last], rows, num_visible)

    def _tile(
        self,
        ctx: Context,
        tokens: Tensor,
        slots: Sequence[int],
        lens: Sequence[int],
        rows: int,
        num_visible: Tensor,
    ) -> _QueryTile:
        """Lay out the indices and the mask of a tile.

        Args:
            ctx: the step.
            tokens: int64 `[B * t]`, the tile's query tokens in the step.
            slots: B request slots.
            lens: B numbers of keys that the sequences' last queries here attend to.
            rows: R, the rows per GEMM.
            num_visible: int64 `[B, 1 or R]`, how many of the keys a row attends to; 1: all rows alike.
        """
        num, heads, size = len(lens), self._shape.num_kv_heads, self._pool.page_size
        num_keys = round_up(max(lens), _BLOCK)
        key = torch.arange(num_keys)
        # A key beyond the sequence is replaced by a real token's: 0 times NaN in an unused row would be NaN.
        at = torch.where(key < torch.tensor(lens)[:, None], key, 0)  # [B, S]
        pages = ctx.page_table.data[list(slots)].long().gather(1, at // size)
        token_slots = pages * self._pool.page_rows + at % size
        index = (token_slots[:, None] * heads + torch.arange(heads)[:, None]).to(
            self._index_dtype
        )  # [B, H, S]
        common = int(num_visible.min())
        return _QueryTile(
            tokens=tokens,
            num=num,
            rows=rows,
            key_index=index.view(-1),
            value_index=index.view(num * heads, -1, _BLOCK).transpose(0, 1).reshape(-1),
            common=common,
            hidden=(key[common:] >= num_visible[:, :, None])[:, None],
        )

    def _max_rows(self, kv_len: int) -> int:
        """Returns the maximum of rows per GEMM over `kv_len` keys, which bounds the memory of the scores."""
        return max(self._rows[0], _MAX_SCORES // (self._shape.num_kv_heads * (kv_len + _BLOCK)))


@cache
def _agreeing_rows(group: int, size: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Returns the numbers of rows per GEMM, ascending and at least `group`, that give a row the same bits.

    Both batched GEMMs are tested, for `group` query heads per key-value head and heads of `size`: the scores
    and the sums of values. They are compared with GEMMs of `reference` rows, for several numbers of GEMMs in
    a batch (`num`), and for keys of several blocks. See `cancelling_inputs` for the inputs.

    Raises:
        ConfigError: not even GEMMs of `reference` rows give the same bits in every batch.
    """
    candidates = [rows for rows in _ROWS if rows >= group] or [group]
    reference = min((rows for rows in candidates if rows >= 16), default=group)
    index = torch.arange(max(candidates)) % reference
    queries, keys = cancelling_inputs(reference, size, _BLOCK, dtype)
    weights, values = cancelling_inputs(reference, _BLOCK, size, dtype)

    def score(rows: int, num: int, blocks: int) -> Tensor:
        """Returns the scores of `num` equal GEMMs, `[num, rows, blocks, _BLOCK]`, in equal blocks."""
        a, b = queries[index[:rows]].repeat(num, 1, 1), keys.repeat(num, blocks, 1)
        return torch.bmm(a, b.transpose(1, 2)).view(num, rows, blocks, _BLOCK)

    def add_up(rows: int, num: int) -> Tensor:
        """Returns the sums of values of `num` equal GEMMs, `[num, rows, size]`, over one block of keys."""
        return torch.bmm(weights[index[:rows]].repeat(num, 1, 1), values.t().repeat(num, 1, 1))

    scores, sums = score(reference, num=3, blocks=1)[0], add_up(reference, num=3)[0]

    def agrees(rows: int) -> bool:
        """Whether GEMMs of `rows` rows give every row the reference's bits, in batches of several shapes."""
        return all(
            bool((score(rows, num, blocks) == scores[index[:rows]]).all())
            and bool((add_up(rows, num * blocks) == sums[index[:rows]]).all())
            for num, blocks in ((1, 1), (2, 3), (7, 8), (48, 2), (1, 63))
        )

    if not agrees(reference):
        raise ConfigError(
            f"deterministic=True: on this CPU, the bits of batched GEMMs of {reference} rows in {dtype}, as "
            "attention has them, depend on their number or length; use another --dtype",
            param="deterministic",
        )
    return tuple(rows for rows in candidates if rows == reference or agrees(rows))
