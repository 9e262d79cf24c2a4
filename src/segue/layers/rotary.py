"""Rotary position embedding: the angles of one step."""

import torch
from torch import Tensor


class Rotary:
    """Cosines and sines for a step's positions, worked out once and shared by all layers."""

    def __init__(self, inverse_frequencies: Tensor, scale: float) -> None:
        """`inverse_frequencies` is float32 `[head_dim / 2]`, radians a token; `scale` is a factor."""
        self.inverse_frequencies = inverse_frequencies
        self.scale = scale

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[T, 1, head_dim]`, as `rotate` wants them, of int64 `[T]` positions."""
        if self.inverse_frequencies.device != positions.device:
            self.inverse_frequencies = self.inverse_frequencies.to(positions.device)
        radians = positions[:, None, None] * self.inverse_frequencies
        cos, sin = radians.cos() * self.scale, radians.sin() * self.scale
        return torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype)
