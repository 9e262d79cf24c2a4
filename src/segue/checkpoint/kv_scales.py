"""The scales of keys and values in FP8 that a checkpoint may have, from the calibration of the model."""

import torch

from segue.checkpoint.safetensors import Shards
from segue.checkpoint.source import ModelSource
from segue.errors import ModelFileError
from segue.kernels.fp8 import MAX, SMALLEST_SCALE

# Of a layer's attention, the newest first: `{0}` is k or v. `kv_scale` is of both.
_NAMES = "{0}_scale", "{0}_proj.{0}_scale", "{0}_proj.output_scale", "kv_scale"
_LARGEST_SCALE = torch.finfo(torch.float32).max / MAX  # by which FP8's greatest value stays finite


def read_kv_scales(source: ModelSource) -> list[tuple[float, float]] | None:
    """Return by layer what keys and values in FP8 have to be multiplied by; None: there are no scales.

    A scale that is missing is 1. Of several scales of a layer, such as one per head, the greatest counts:
    with it, nothing is too large.

    Raises:
        ModelFileError: a file cannot be read, or a scale is of no use.
    """
    if source.format != "safetensors":
        return None
    layers = range(source.config.num_layers)
    shards = Shards.in_directory(source.directory)
    try:
        found = [(_read(shards, layer, "k"), _read(shards, layer, "v")) for layer in layers]
    finally:
        shards.close()
    if not any(scale for pair in found for scale in pair):
        return None
    return [(key or 1.0, value or 1.0) for key, value in found]


def _read(shards: Shards, layer: int, kind: str) -> float | None:
    """Return the scale of a layer's keys (`kind` "k") or values ("v"); None: there is none."""
    for suffix in _NAMES:
        name = f"model.layers.{layer}.self_attn.{suffix.format(kind)}"
        stored = shards.tensors.get(name)
        if stored is None or not stored.num_bytes:
            continue
        raw = torch.empty(stored.num_bytes, dtype=torch.uint8)
        stored.read_into(0, raw.numpy().data)
        scale = raw.view(stored.dtype).double().max().item()
        if not SMALLEST_SCALE <= scale <= _LARGEST_SCALE:
            raise ModelFileError(
                f"model file {stored.file.name}: tensor {name!r} is {scale}; a scale of keys or values must "
                f"be a number from {SMALLEST_SCALE:.3g} to {_LARGEST_SCALE:.3g}. Get the weights again, or "
                "leave --kv-cache-dtype out"
            )
        return scale
    return None
