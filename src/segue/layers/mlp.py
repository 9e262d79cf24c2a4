"""The gated MLP of one decoder layer."""

from torch import Tensor

from segue.distributed.collectives import Collectives
from segue.kernels.activation import gate_up_silu, silu_mul, silu_mul_batch_invariant
from segue.layers.base import Layer
from segue.layers.linear import Linear, RowParallelLinear


class MLP(Layer):
    """`down(silu(gate(x)) * up(x))`, with gate and up in one GEMM."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        collectives: Collectives,
        deterministic: bool = False,
    ) -> None:
        """`intermediate_size` is this rank's share."""
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, bias=bias, deterministic=deterministic)
        self.down = RowParallelLinear(
            intermediate_size, hidden_size, bias=bias, collectives=collectives, deterministic=deterministic
        )
        self.activation = silu_mul_batch_invariant if deterministic else silu_mul

    def forward(self, x: Tensor) -> Tensor:
        """`[T, hidden] -> [T, hidden]`; this rank's summand, which `RMSNorm.add` sums over the ranks."""
        gate_up = self.gate_up
        output: Tensor = self.down(
            gate_up_silu(x, gate_up.weight, gate_up.bias, gate_up.packed, self.activation)
        )
        return output
