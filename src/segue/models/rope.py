"""The frequencies of rotary position embeddings, for each kind of scaling to longer contexts."""

import math

import torch
from torch import Tensor

from segue.models.config import RopeConfig


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
    return stretched * (1 - keep) + kept * keep


def _yarn_scale(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return _temperature(config.factor, config.mscale) / _temperature(config.factor, config.mscale_all_dim)
    return _temperature(config.factor, 1.0)


def _temperature(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
