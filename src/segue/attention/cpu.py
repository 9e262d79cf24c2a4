"""Attention on the CPU from stock torch operators."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from segue.attention.base import AttentionShape, Capabilities
from segue.attention.context import Context
from segue.kvcache.pool import KVPool

CAPABILITIES = Capabilities(
    devices=("cpu",),
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    page_sizes=None,
    decode_graph=False,
    prefill_graph=False,
    deterministic=False,
    indexes_by_row=True,
)


class CPUAttention:
    """Gathers each sequence's pages, then one product a sequence."""

    def __init__(self, shape: AttentionShape, pool: KVPool) -> None:
        """Serve a model of `shape` whose cache is `pool`."""
        self.shape = shape
        self.pool = pool

    def prepare(self, ctx: Context) -> None:
        """Nothing is shared yet."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, layer: int, ctx: Context) -> Tensor:
        """See `AttentionBackend.forward`."""
        output = torch.zeros_like(query)
        keys, values = self.pool.keys(layer), self.pool.values(layer)
        start = 0
        for row, q_len, kv_len in zip(ctx.rows, ctx.q_lens, ctx.kv_lens, strict=True):
            skip = max(0, q_len - kv_len)
            pages = ctx.page_table.data[row, : -(-kv_len // self.pool.page_size)]
            k = keys.index_select(0, pages).flatten(0, 1)[:kv_len].transpose(0, 1)
            v = values.index_select(0, pages).flatten(0, 1)[:kv_len].transpose(0, 1)
            q = query[start + skip : start + q_len].transpose(0, 1)
            mask = torch.ones(q.shape[1], kv_len, dtype=torch.bool).tril(kv_len - q.shape[1])
            out = F.scaled_dot_product_attention(q[None], k[None], v[None], mask, scale=self.shape.scale, enable_gqa=True)
            output[start + skip : start + q_len] = out[0].transpose(0, 1)
            start += q_len
        return output
