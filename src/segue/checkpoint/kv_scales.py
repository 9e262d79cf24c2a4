"""The scales of keys and values in FP8 that a checkpoint may have, from the calibration of the model."""

import math

import torch

from segue.checkpoint.safetensors import Shards
from segue.checkpoint.source import ModelSource
from segue.errors import ModelFileError


def read_kv_scales(source: ModelSource) -> list[tuple[float, float]] | None:
    """Return by layer what keys and values in FP8 have to be multiplied by; None: there are no scales.

    A scale that is missing is 1. Of several scales of a layer, such as one per head, the greatest counts:
    with it, nothing is too large.

    Raises:
        ModelFileError: a file cannot be read, or a scale is no positive number.
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
    attention = f"model.layers.{layer}.self_attn"
    for name in (f"{attention}.{kind}_scale", f"{attention}.{kind}_proj.{kind}_scale"):
        stored = shards.tensors.get(name)
        if stored is None or not stored.num_bytes:
            continue
        raw = torch.empty(stored.num_bytes, dtype=torch.uint8)
        stored.read_into(0, raw.numpy().data)
        scale = raw.view(stored.dtype).double().max().item()
        if not 0 < scale < math.inf:
            raise ModelFileError(
                f"model file {stored.file.name}: tensor {name!r} is {scale}; a scale of keys or values must "
                "be a positive number. Get the weights again, or leave --kv-cache-dtype out"
            )
        return scale
    return None
