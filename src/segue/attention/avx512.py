"""Attention on CPUs with AVX512-BF16, by the kernels of `segue.kernels.cpu`, which read the pool in place.

The kernel for prompts packs the keys and values of a sequence first, and adds up in an order that depends
only on a query's place in its sequence. The one for decode rows reads them where they are, divides long
contexts into parts, and adds up in another order.
"""

from __future__ import annotations

from torch import Tensor

from segue.attention.base import AttentionBackend, AttentionShape, Context
from segue.kernels.cpu.build import kernels
from segue.kvcache.pool import KVPool


class AVX512Attention(AttentionBackend):
    """One call for all decode rows, and one for all prompts."""

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        """Make the backend of a model of `shape` whose cache is `pool`."""
        library = kernels().library
        assert library is not None, "the registry asks before it makes this backend"
        self._library = library
        self._pool = pool
        self._sizes = (shape.num_heads, shape.num_kv_heads, shape.head_dim, pool.page_size, pool.page_rows)
        self._scale = shape.scale

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, layer: int, ctx: Context
    ) -> Tensor:
        """Attend for all sequences; see `AttentionBackend.forward`. `key` and `value` are not read."""
        output = query.new_empty(query.shape)
        if ctx.num_decode:
            self._decode(query, output, layer, ctx)
        if ctx.has_prefill:
            self._prefill(query, output, layer, ctx, first=ctx.num_decode)
        return output

    def _decode(self, query: Tensor, output: Tensor, layer: int, ctx: Context) -> None:
        """Attend for the decode rows: the first tokens of `query` and `output`, `[T, heads, head_dim]`."""
        self._library.decode_attention(
            *self._inputs(query, layer, ctx),
            ctx.kv_lens_device.data_ptr(),
            output.data_ptr(),
            ctx.num_decode,
            *self._sizes,
            self._scale,
            kernels().tiles,
        )

    def _prefill(self, query: Tensor, output: Tensor, layer: int, ctx: Context, first: int) -> None:
        """Attend for the sequences from number `first` on, with any number of tokens each."""
        self._library.prefill_attention(
            *self._inputs(query, layer, ctx),
            ctx.cu_seqlens_q_device.data_ptr(),
            ctx.kv_lens_device.data_ptr(),
            output.data_ptr(),
            first,
            len(ctx.slots),
            *self._sizes,
            self._scale,
            kernels().tiles,
        )

    def _inputs(self, query: Tensor, layer: int, ctx: Context) -> tuple[int, ...]:
        """Returns the first arguments of both kernels: the queries, the layer's pool and the page table."""
        table = ctx.page_table.data
        return (
            query.data_ptr(),
            query.stride(0),
            self._pool.key_rows[layer].data_ptr(),
            self._pool.value_rows[layer].data_ptr(),
            table.data_ptr(),
            table.stride(0),
            ctx.slots_device.data_ptr(),
        )


class AVX512InvariantAttention(AVX512Attention):
    """Batch-invariant: decode rows are prompts of one token."""

    def forward(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, layer: int, ctx: Context
    ) -> Tensor:
        """Attend for all sequences; see `AttentionBackend.forward`. `key` and `value` are not read."""
        output = query.new_empty(query.shape)
        self._prefill(query, output, layer, ctx, first=0)
        return output
