"""Attention on CPUs with AVX512-BF16, by the kernels of `segue.kernels.cpu`, which read the pool in place."""

from __future__ import annotations

from torch import Tensor

from segue.attention.base import AttentionBackend, AttentionShape, Context
from segue.kernels.cpu.build import kernels
from segue.kvcache.pool import KVPool


class AVX512Attention(AttentionBackend):
    """One call for all decode rows, and one per prompt."""

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
        for slot, start, q_len, kv_len in ctx.prompts():
            blind = max(0, q_len - kv_len)  # queries that attend to no key, whose output is 0
            output[start : start + blind] = 0
            tokens = slice(start + blind, start + q_len)
            if kv_len:
                self._prefill(query[tokens], output[tokens], layer, ctx.page_table.data[slot], kv_len)
        return output

    def _decode(self, query: Tensor, output: Tensor, layer: int, ctx: Context) -> None:
        """Attend for the decode rows: the first tokens of `query` and `output`, `[T, heads, head_dim]`."""
        self._library.decode_attention(
            query.data_ptr(),
            query.stride(0),
            self._pool.key_rows[layer].data_ptr(),
            self._pool.value_rows[layer].data_ptr(),
            ctx.page_table.data.data_ptr(),
            ctx.page_table.data.stride(0),
            ctx.slots_device.data_ptr(),
            ctx.kv_lens_device.data_ptr(),
            output.data_ptr(),
            ctx.num_decode,
            *self._sizes,
            self._scale,
        )

    def _prefill(self, query: Tensor, output: Tensor, layer: int, pages: Tensor, kv_len: int) -> None:
        """Attend for the last tokens of one sequence, which has `kv_len` tokens in `pages`.

        `query` and `output` are `[q_len, heads, head_dim]`, with `q_len <= kv_len`.
        """
        self._library.prefill_attention(
            query.data_ptr(),
            query.stride(0),
            self._pool.key_rows[layer].data_ptr(),
            self._pool.value_rows[layer].data_ptr(),
            pages.data_ptr(),
            output.data_ptr(),
            len(query),
            kv_len,
            *self._sizes,
            self._scale,
        )
