"""Staged weights: received and checked beside the served ones, and not yet committed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor

from segue.memory.arena import Arena, TensorSpec
from segue.memory.tensor_ops import are_finite, box_of, copy_into, equal
from segue.messages.weight_operations import StagingPlace
from segue.models.weight_map import Box
from segue.weight_update.served import ServedWeights
from segue.weight_update.staging_memory import StagingArena, StagingMemory


class StagedWeights:
    """All weights of one session, in staging memory."""

    def __init__(self, served: ServedWeights, memory: StagingMemory) -> None:
        self.served = served
        self.names: set[str] = set()  # checkpoint names, none of them stacked
        self.note = ""  # why weights are staged on the host; empty: they are where they were asked for
        self.num_bytes = 0
        self.memory = memory
        self._stagings: list[StagingArena] = []
        self._whole: Arena | None = None
        self._views: dict[str, Tensor] = {}  # parameter, or tied checkpoint name -> its staging memory

    @property
    def place(self) -> str:
        """Where the weights are staged: `device`, `host`, or `none` while nothing is staged."""
        places = {staging.place for staging in self._stagings}
        return "host" if "host" in places else "device" if places else "none"

    @property
    def parameters(self) -> list[str]:
        """The model's parameters that are staged."""
        return [name for name in self._views if name not in self.served.weight_map.aliases]

    @property
    def whole(self) -> Arena:
        """The arena of a session that has allocated memory for all weights at once."""
        assert self._whole is not None
        return self._whole

    def add(self, names: Iterable[str], place: StagingPlace = "auto", receive_buffer: int = 0) -> None:
        """Allocate memory for the parameters that the checkpoint's `names` write, unless they have some.

        The parts of a parameter that they do not write are copied from the served weights. `receive_buffer`:
        see `StagingMemory.take`.

        Raises:
            OutOfMemoryError: there is too little memory; the message says how many bytes are missing.
        """
        table = self.served.weight_map
        names = list(names)
        aliases = [name for name in names if name in table.aliases and name not in self._views]
        written = {
            each for name in names if name not in table.aliases for each in table.stacked.get(name, (name,))
        }
        touched = {part.parameter for name in written for part in table.slices[name]}
        new = [spec for spec in self.served.specs if spec.name in touched and spec.name not in self._views]
        if new:
            self._take(None if len(new) == len(table.parameters) else new, new, place, receive_buffer)
        if aliases:
            tied = [self._tied_spec(name) for name in aliases]
            self._take(tied, tied, place, 0)
        self.names |= written
        with self.memory.on_stream():
            for spec in new:
                self._prepare(spec.name)
        self.memory.synchronize()

    def parts(self, name: str) -> Iterator[tuple[Tensor, Box]]:
        """Yields staging memory and source slice of each part that this rank keeps of tensor `name`."""
        meaning = self.served.weight_map.aliases.get(name)
        for part in self.served.weight_map.slices[meaning or name]:
            if meaning is None:
                yield box_of(self._views[part.parameter], part.destination, len(part.source)), part.source
            else:
                yield self._views[name], part.source

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Returns pairs of served memory and the staged memory to copy there."""
        served = self.served.arena
        if self._whole is not None:
            return list(zip(served.slabs, self._whole.slabs, strict=True))
        return [(served.view(name), self._views[name]) for name in self.parameters]

    def problems(self, names: Collection[str]) -> list[str]:
        """Returns the problems of the staged `names`: not finite values, or a different tied tensor."""
        with self.memory.on_stream():
            return [*self._not_finite(names), *self._untied(names)]

    def release(self, *, in_use: bool = False) -> None:
        """Give the memory back; if it is `in_use`, it is kept for its user for ever, and never reused."""
        self._views.clear()
        self.memory.synchronize()
        for staging in self._stagings:
            self.memory.give_back(staging, in_use=in_use)
        self._stagings.clear()
        self._whole = None
        self.names.clear()
        self.num_bytes = 0

    def _take(
        self, specs: list[TensorSpec] | None, new: list[TensorSpec], place: StagingPlace, receive_buffer: int
    ) -> None:
        staging = self.memory.take(specs, place, receive_buffer)
        self._stagings.append(staging)
        with self.memory.on_stream():
            staging.arena.zero_gaps()
        if specs is None:
            self._whole = staging.arena
        self.note = staging.note or self.note
        self.num_bytes += sum(spec.num_bytes for spec in new)
        for spec in new:
            self._views[spec.name] = staging.arena.view(spec.name)

    def _tied_spec(self, name: str) -> TensorSpec:
        rows = [
            part.source[0] for part in self.served.weight_map.slices[self.served.weight_map.aliases[name]]
        ]
        shape = (sum(box.stop - box.start for box in rows), self.served.config.hidden_size)
        return TensorSpec(name=name, shape=shape, dtype=self.served.dtype)

    def _prepare(self, parameter: str) -> None:
        view = self._views[parameter]
        if not self.served.writers[parameter] <= self.names:
            copy_into(view, self.served.arena.view(parameter))
        elif parameter in self.served.weight_map.padding:
            view[self.served.weight_map.padding[parameter]].zero_()

    def _not_finite(self, names: Collection[str]) -> list[str]:
        table = self.served.weight_map
        parameters = list({part.parameter for name in names for part in table.slices.get(name, ())})
        found = are_finite([self._views[name] for name in parameters], self.served.dtype)
        bad = {name for name, finite in zip(parameters, found, strict=True) if not finite}
        return [
            not_finite(name, self.served.dtype)
            for name in names
            if any(part.parameter in bad for part in table.slices.get(name, ()))
            and not all(are_finite([view for view, _ in self.parts(name)], self.served.dtype))
        ]

    def _untied(self, names: Collection[str]) -> list[str]:
        """Error texts for tensors that must equal another one (a tied head and its embedding) and do not."""
        table, found = self.served.weight_map, []
        for name, tied_to in table.aliases.items():
            if name not in names:
                continue
            for part in table.slices[tied_to]:
                held = self._views.get(part.parameter, self.served.arena.view(part.parameter))
                if not equal(self._views[name], held[part.destination], self.served.dtype):
                    found.append(untied(name, tied_to))
        return found


def not_finite(name: str, dtype: torch.dtype) -> str:
    """Returns the message for a tensor with infinities or NaN."""
    return f"{name!r} has values that are not finite in {str(dtype).removeprefix('torch.')}"


def untied(name: str, meaning: str) -> str:
    """Returns the message for a tied tensor that differs."""
    return f"{name!r} differs from {meaning!r}, to which this model ties it: send one of them, or both equal"
