"""What a weight update needs to know of the model it changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from segue.distributed.info import TPInfo
from segue.memory.arena import Arena, TensorSpec
from segue.models.config import ModelConfig
from segue.models.weight_map import Box, WeightMap


class Submit(Protocol):
    """Queues work where the steps run, behind those submitted before."""

    def __call__(self, work: Callable[[], Any], /) -> Future[Any]:
        """The future is done when `work` has run, or on CUDA when it has been launched."""
        ...


@dataclass(frozen=True, kw_only=True)
class ServedWeights:
    """The weights a rank serves with, and how to change them."""

    arena: Arena
    table: WeightMap
    config: ModelConfig
    tp: TPInfo
    device: torch.device
    dtype: torch.dtype
    submit: Submit
    rebuild: Callable[[Collection[str]], object]  # what is derived of these parameters
    cache_dir: Path = Path("/nonexistent")  # for GGUF files
    seed: int = 0  # of dummy weights
    master_allow: tuple[str, ...] = ()  # hosts and networks where groups may be joined; none: any
    reserved: int = 0  # bytes of device memory kept free for staging
    headroom: int = 0  # bytes of free device memory that the steps may still take

    @property
    def specs(self) -> list[TensorSpec]:
        """Of all parameters, in the order of the arena."""
        return [
            TensorSpec(name=name, shape=entry.shape, dtype=entry.dtype)
            for name, entry in self.arena.table.items()
        ]

    @cached_property
    def writers(self) -> Mapping[str, frozenset[str]]:
        """Parameter -> the checkpoint names that together write all of it; none of them stacked."""
        found: dict[str, set[str]] = {parameter: set() for parameter in self.table.parameters}
        for name in self.table.names:
            for part in self.table.slices[name]:
                found[part.parameter].add(name)
        return {parameter: frozenset(names) for parameter, names in found.items()}


def box_of(parameter: Tensor, box: Box, dims: int) -> Tensor:
    """The view of `box`, with `dims` dimensions: one expert's matrix loses the leading 1."""
    view = parameter[box]
    return view[0] if view.dim() > dims else view
