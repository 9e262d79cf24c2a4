"""FlashAttention-3, for Hopper, from an optional package: `pip install 'segue[fa3]'`.

FlashAttention-3 reads the pool in place, through page tables that are gathered once per step. In a step with
both decode rows and prompts, decode and prefill are one call each over all sequences. Each call has its own
`cu_seqlens_q`, in which the sequences of the other call have no queries.

Where pages are at least as large as its tiles, FlashAttention-3 would load whole tiles by TMA, and a NaN in
an unused KV slot would reach the output. Passing a left padding of zero tokens turns TMA off.
"""

from __future__ import annotations

import torch
from torch import Tensor

from segue.attention.base import AttentionShape, Context, PagedBackend
from segue.kvcache.pool import KVPool


class FA3Attention(PagedBackend):
    """Decode and prefill by FlashAttention-3's `fwd` operator on one pool."""

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        """Make the backend of a model of `shape` whose cache is `pool`."""
        import flash_attn_3._C  # noqa: F401 - the import registers the operators

        self._forward = torch.ops.flash_attn_3.fwd
        self._shape = shape
        self._pages = [(pool.data[:, layer, 0], pool.data[:, layer, 1]) for layer in range(pool.num_layers)]
        self._table = self._kv_lens = self._padding = self._starts = self._decode_starts = torch.empty(0)

    def queries_per_block(self, tokens: int) -> int:
        """Returns `tokens`: one block per sequence, since FlashAttention-3 reads no blocks."""
        return tokens

    def prepare(self, ctx: Context) -> None:
        """Gather the page table, and compute the `cu_seqlens_q` of both calls.

        Decode rows have one query each, so the number of decode rows is also where the prompts' tokens start.
        Clamping `cu_seqlens_q` to it leaves the sequences of the other call without queries.
        """
        count = len(ctx.slots_device) if ctx.has_prefill else ctx.num_decode
        self._table = ctx.page_table.data.index_select(0, ctx.slots_device[:count])
        self._kv_lens = ctx.kv_lens_device[:count]
        self._padding = torch.zeros_like(self._kv_lens)
        if ctx.has_prefill:
            num_decode: int | Tensor = ctx.num_decode
            if ctx.num_decode and ctx.num_decode_device is not None:
                num_decode = ctx.num_decode_device
            if self.serves_prefill:
                self._starts = torch.clamp(ctx.cu_seqlens_q_device, min=num_decode)
            if self.serves_decode:
                self._decode_starts = torch.clamp(ctx.cu_seqlens_q_device, max=num_decode)

    def decode(self, query: Tensor, output: Tensor, layer: int, ctx: Context) -> None:
        """See `PagedBackend.decode`.

        A step without prompts needs no `cu_seqlens_q`: each row is a sequence of one query.
        """
        rows = slice(ctx.num_decode)  # the buffer of the splits' partial results grows with the queries
        if ctx.has_prefill:
            self._run(query[rows], output[rows], layer, self._decode_starts, max_len=1, splits=0)
        else:  # [S, 1, heads, head_dim]
            self._run(query[:, None], output[:, None], layer, None, max_len=None, splits=0)

    def prefill(self, query: Tensor, output: Tensor, layer: int, ctx: Context) -> None:
        """See `PagedBackend.prefill`. `query` has the decode rows too, which `self._starts` skips."""
        self._run(query, output, layer, self._starts, max_len=len(query), splits=1)

    def _run(
        self,
        query: Tensor,
        output: Tensor,
        layer: int,
        starts: Tensor | None,
        *,
        max_len: int | None,
        splits: int,
    ) -> None:
        """Attend into `output`.

        Args:
            query: `[T, heads, head_dim]`, or with `starts=None` `[S, T, heads, head_dim]`, equally many each.
            output: as `query`.
            layer: index of the layer, whose keys and values are read.
            starts: cumulative number of queries, int32 `[S + 1]` (`cu_seqlens_q`).
            max_len: an upper bound of the queries per sequence; None with `starts=None`.
            splits: parts that the keys are split into (split-KV); 0: FlashAttention-3 chooses the number.
        """
        keys, values = self._pages[layer]
        self._forward(
            query,
            keys,
            values,
            out=output,
            cu_seqlens_q=starts,
            seqused_k=self._kv_lens,
            max_seqlen_q=max_len,
            page_table=self._table,
            leftpad_k=self._padding,
            softmax_scale=self._shape.scale,
            is_causal=True,
            num_splits=splits,
        )
