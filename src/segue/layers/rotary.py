"""Rotary position embedding: cosines and sines of the positions."""

import torch
from torch import Tensor


class Rotary:
    """Computes the cosines and sines that all layers of a step share."""

    def __init__(self, inverse_frequencies: Tensor, scale: float, max_position: int) -> None:
        """`inverse_frequencies`: float32 `[head_dim / 2]`, radians per token; `scale` multiplies both."""
        self.inverse_frequencies = inverse_frequencies
        self.scale = scale
        self.max_position = max_position
        self._table: tuple[Tensor, Tensor] | None = None

    def build_derived(self, device: torch.device) -> int:
        """Make CUDA's table of all positions; returns its bytes."""
        if device.type != "cuda":
            return 0
        if self._table is not None:  # the table depends on no weight
            return 2 * self._table[0].nbytes
        positions = torch.arange(self.max_position, device=device)
        radians = positions[:, None] * self.inverse_frequencies.to(device)
        self._table = (radians.cos() * self.scale, radians.sin() * self.scale)
        return 2 * self._table[0].nbytes

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines in the layout of the device's kernels.

        On a CPU they are those of `positions` (int64 `[T]`), `[T, 1, head_dim]`, for `rotate`; on CUDA they
        are the tables of all positions, float32 `[max_position, head_dim / 2]`.
        """
        if self._table is not None:
            return self._table
        radians = positions[:, None, None] * self.inverse_frequencies
        cos, sin = radians.cos() * self.scale, radians.sin() * self.scale
        return torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype)
