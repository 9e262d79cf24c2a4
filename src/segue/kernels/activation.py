"""The gated activation of the MLP."""

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `[..., 2 * I]`, gate first; `[..., I]`. May overwrite `gate_up`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
