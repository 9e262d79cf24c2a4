"""The served weights of a rank, as a weight update sees them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from segue.distributed.info import TPInfo
from segue.kernels.ops import Derived
from segue.memory.arena import Arena, TensorSpec
from segue.memory.rank_memory import RankMemory
from segue.models.config import ModelConfig
from segue.models.destination import Destination, destination_of
from segue.models.weight_map import Slice, WeightMap


@dataclass(frozen=True, kw_only=True)
class ServedWeights:
    """The weights that a rank serves with, and the means to change them."""

    arena: Arena
    weight_map: WeightMap
    config: ModelConfig
    tp: TPInfo
    memory: RankMemory
    dtype: torch.dtype
    # Queues work on the compute stream, behind the steps submitted before. The future is done when the work
    # has run, or on CUDA when it was launched.
    submit: Callable[[Callable[[], Any]], Future[Any]]
    # Rebuilds everything derived from these parameters; copies of those that are packed already are given.
    rebuild: Callable[[Collection[str], Mapping[str, Derived]], object]
    # Returns what packs new values of a parameter (and the scales of one in FP8); None: no layer copies it.
    packer: Callable[[str], Callable[[Tensor, Tensor | None], Derived | None] | None] = lambda _: None
    cache_dir: Path = Path("/nonexistent")  # for GGUF files
    # Repository on the hub -> its revision that is served; of others the main branch is read.
    revisions: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0  # of dummy weights
    master_allow: tuple[str, ...] = ()  # hosts and networks where groups may be joined; empty: any
    reserved: int = 0  # bytes of device memory kept free for staging
    headroom: int = 0  # bytes of free device memory that the steps may still take
    receive_share: float = 1.0  # of the time, that NCCL's kernels may take while steps run
    is_generating: Callable[[], bool] = lambda: False  # whether steps run at present
    # Checkpoint names of tensors that have not been sent since the weights were released or reset.
    missing: set[str] = field(default_factory=set)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.memory.device

    @property
    def specs(self) -> list[TensorSpec]:
        """The specs of all parameters, in the order of the arena."""
        return [*self.arena.layout.table.values()]

    @cached_property
    def writers(self) -> Mapping[str, frozenset[str]]:
        """Parameter -> the checkpoint names that together write all of it.

        For experts these are the names of each one's matrices, not those of stacked tensors.
        """
        found: dict[str, set[str]] = {parameter: set() for parameter in self.weight_map.parameters}
        for name in self.weight_map.names:
            for part in self.weight_map.slices[name]:
                found[part.parameter].add(name)
        for parameter, scales in self.weight_map.scales.items():
            found[scales.name] = found[parameter]
        return {parameter: frozenset(names) for parameter, names in found.items()}

    def destination(self, part: Slice, view: Callable[[str], Tensor] | None = None) -> Destination:
        """Return where `part` is served, or where it goes by the memory that `view` returns by name."""
        return destination_of(view or self.arena.view, self.weight_map, part, self.dtype)

    def note_lost(self) -> None:
        """Note that the values of all weights are lost."""
        self.missing.update(*self.writers.values())

    def note_sent(self, names: Iterable[str]) -> None:
        """Note that these tensors were written; a stacked name stands for those of all experts."""
        if not self.missing:  # the usual case, made fast because generation waits for it
            return
        for name in names:
            self.missing.difference_update(self.weight_map.stacked.get(name, (name,)))
