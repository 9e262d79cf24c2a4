"""Rotary position embeddings: their cosines and sines, for each kind of scaling to longer contexts."""

import math

import torch
from torch import Tensor

from segue.models.config import RopeConfig


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
        if self._table is None:  # the table depends on no weight
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


def inverse_frequencies(config: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return the frequencies, float32 `[head_dim / 2]` in radians per token, and the scale of cos and sin."""
    base = 1.0 / config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match config.kind:
        case "default":
            return base, 1.0
        case "linear":
            return base / config.factor, 1.0
        case "llama3":
            return _llama3(config, base), 1.0
        case "yarn":
            return _yarn(config, base, head_dim), _yarn_scale(config)


def _llama3(config: RopeConfig, base: Tensor) -> Tensor:
    """Llama 3.1: low frequencies are divided by the factor, high ones are kept, those between are blended."""
    turns = config.original_max_position * base / (2 * math.pi)  # turns over the trained context
    keep = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    return _blend(base / config.factor, base, keep.clamp(0.0, 1.0))


def _yarn(config: RopeConfig, base: Tensor, head_dim: int) -> Tensor:
    """YaRN (arXiv 2309.00071): a linear ramp over the dimensions, between two numbers of turns."""

    def dimension(turns: float) -> float:
        """Return the dimension whose frequency makes so many turns over the trained context."""
        wavelength = config.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001
    stretch = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return _blend(base / config.factor, base, 1 - stretch)


def _blend(stretched: Tensor, kept: Tensor, keep: Tensor) -> Tensor:
    """Return the weighted mean of two sets of frequencies; `keep`, 0 to 1, is the weight of `kept`."""
    return stretched * (1 - keep) + kept * keep


def _yarn_scale(config: RopeConfig) -> float:
    """Return YaRN's factor of cos and sin, which sharpens attention over the longer context."""
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return _temperature(config.factor, config.mscale) / _temperature(config.factor, config.mscale_all_dim)
    return _temperature(config.factor, 1.0)


def _temperature(factor: float, mscale: float) -> float:
    """Return YaRN's attention temperature for a context that is `factor` times as long as the trained one."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
