"""New weights that are not staged: a commit copies them from where they are to the served weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from segue.memory.tensor_ops import are_finite
from segue.models.weight_map import Slice, box_of
from segue.weight_update.manifest import first
from segue.weight_update.served import ServedWeights
from segue.weight_update.staging import not_finite, untied
from segue.weight_update.staging_memory import StagingMemory


@dataclass(frozen=True)
class ZeroCopyTensors:
    """Tensors that are not copied to staging memory: a commit copies them straight to the served weights."""

    served: ServedWeights
    memory: StagingMemory
    tensors: dict[str, Tensor]  # by checkpoint name, of known names and right shapes, on the served device

    @property
    def parameters(self) -> set[str]:
        """The model's parameters that these tensors write, in whole or in part."""
        slices = self.served.weight_map.slices
        return {part.parameter for name in self.tensors for part in slices.get(name, ())}

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Returns pairs of served memory and the slice to copy there."""
        return [
            (self._served_values(part), tensor[part.source])
            for name, tensor in self.tensors.items()
            for part in self.served.weight_map.slices.get(name, ())
        ]

    def problems(self) -> list[str]:
        """Returns the problems of the values: not finite, or different from a tied tensor."""
        table, dtype = self.served.weight_map, self.served.dtype
        slices = [
            (name, part, tensor[part.source])
            for name, tensor in self.tensors.items()
            for part in table.slices[table.aliases.get(name, name)]
        ]
        with self.memory.on_stream():
            finite = are_finite([mine for _, _, mine in slices], dtype)
            bad = {name for (name, _, _), is_finite in zip(slices, finite, strict=True) if not is_finite}
            found = [not_finite(name, dtype) for name in self.tensors if name in bad]
            return first(found + untied(self.served, self.tensors, self._tied))

    def _tied(self, name: str, part: Slice) -> tuple[Tensor, Tensor]:
        """Returns a part of a tied tensor, and the embedding's: of these tensors, or else the served one."""
        held = self.tensors.get(self.served.weight_map.aliases[name])
        values = self._served_values(part) if held is None else held[part.source]
        return self.tensors[name][part.source], values

    def _served_values(self, part: Slice) -> Tensor:
        """Returns the served memory that a part fills, in the shape of the tensor's box."""
        return box_of(self.served.arena.view(part.parameter), part)
