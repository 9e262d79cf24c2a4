"""Self-attention of one decoder layer."""

from torch import Tensor, nn

from segue.attention.context import Context
from segue.distributed.collectives import Collectives
from segue.kernels.kv_write import write_kv
from segue.kernels.rotary import rotate
from segue.layers.linear import Linear, RowParallelLinear
from segue.layers.norm import RMSNorm


class Attention(nn.Module):
    """Projections, optional QK-norm, rotation and the paged cache; sizes are this rank's."""

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
    ) -> None:
        """`layer` is the index into the KV pool."""
        super().__init__()
        self.layer = layer
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.qkv = Linear(hidden_size, (num_heads + 2 * num_kv_heads) * head_dim, bias=qkv_bias)
        self.o = RowParallelLinear(num_heads * head_dim, hidden_size, bias=o_bias, collectives=collectives)
        self.q_norm = RMSNorm(head_dim, eps) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps) if qk_norm else None

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], ctx: Context) -> Tensor:
        """`[T, hidden] -> [T, hidden]`."""
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        query, key, value = qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query, *angles), rotate(key, *angles)
        write_kv(ctx.kv.data, self.layer, ctx.slots, key, value)
        attended = ctx.backend.forward(query, key, value, self.layer, ctx)
        return self.o(attended.flatten(1))
