"""Self-attention of one decoder layer."""

import torch
from torch import Tensor

from segue.attention.context import Context
from segue.distributed.collectives import Collectives
from segue.kernels.ops import rms_norm, rotate
from segue.layers.blocks import Layer, Linear, RMSNorm, RowParallelLinear

Angles = tuple[Tensor, Tensor]
"""The cosines and sines of RoPE, computed once per step for all layers; see `models.rope.Rotary.angles`."""


class Attention(Layer):
    """Projections, optional QK-norm, RoPE and attention over the paged cache; sizes are this rank's."""

    def __init__(
        self,
        *,
        layer: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        o_bias: bool,
        qk_norm: bool,
        eps: float,
        collectives: Collectives,
        deterministic: bool = False,
    ) -> None:
        """`layer` is the index into the KV pool."""
        super().__init__()
        self.layer = layer
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.eps = eps
        size = (num_heads + 2 * num_kv_heads) * head_dim
        self.qkv = Linear(hidden_size, size, bias=qkv_bias, may_split=True, deterministic=deterministic)
        self.o = RowParallelLinear(
            num_heads * head_dim,
            hidden_size,
            bias=o_bias,
            collectives=collectives,
            deterministic=deterministic,
        )
        self.q_norm = RMSNorm(head_dim, eps) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps) if qk_norm else None
        self.qk_weight: Tensor | None = None

    def build_derived(self) -> int:
        """Concatenate the query and key norms' weights, so that one pass normalises both; returns its bytes.

        The address stays the same, because captured graphs read from it.
        """
        if self.q_norm is None or self.k_norm is None:
            return 0
        query = self.q_norm.weight.float().expand(self.num_heads, -1)
        key = self.k_norm.weight.float().expand(self.num_kv_heads, -1)
        weight = torch.cat([query, key])
        self.qk_weight = weight if self.qk_weight is None else self.qk_weight.copy_(weight)
        return self.qk_weight.nbytes

    def forward(
        self, x: Tensor, angles: Angles, ctx: Context, logits_indices: Tensor | None = None
    ) -> Tensor:
        """`[T, hidden] -> [T, hidden]`, or `[L, hidden]` of the tokens `logits_indices` (int `[L]`).

        The result is this rank's summand, which `RMSNorm` sums over the ranks.
        """
        norm_rope_store = self._norm_rope_store_cuda if x.is_cuda else self._norm_rope_store
        query, key, value = norm_rope_store(self.qkv(x), angles, ctx)
        attended = ctx.backend.forward(query, key, value, self.layer, ctx).flatten(1)
        output: Tensor = self.o(
            attended if logits_indices is None else attended.index_select(0, logits_indices)
        )
        return output

    def _norm_rope_store(self, qkv: Tensor, angles: Angles, ctx: Context) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.num_heads + self.num_kv_heads
        qkv = qkv.view(qkv.shape[0], -1, self.head_dim)
        qk = qkv[:, :heads]
        if self.q_norm is not None:
            assert self.qk_weight is not None, "build_derived comes first"
            qk = rms_norm(qk, self.qk_weight, self.eps)
        qk = rotate(qk, *angles)
        query, key, value = qk[:, : self.num_heads], qk[:, self.num_heads :], qkv[:, heads:]
        ctx.kv.write(self.layer, ctx.slot_mapping, key, value)
        return query, key, value

    def _norm_rope_store_cuda(self, qkv: Tensor, angles: Angles, ctx: Context) -> tuple[Tensor, None, None]:
        from segue.kernels.triton.norm import qk_norm_rope_store

        query = qk_norm_rope_store(
            qkv,
            self.qk_weight,
            self.eps,
            *angles,
            ctx.positions,
            ctx.slot_mapping,
            ctx.kv.key_rows[self.layer],
            ctx.kv.value_rows[self.layer],
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )
        return query, None, None
