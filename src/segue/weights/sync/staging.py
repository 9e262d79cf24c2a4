"""New weights beside the live ones: received, checked, and not yet served with."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor

from segue.memory.arena import Arena, TensorSpec
from segue.memory.digest import MASK, digest
from segue.protocol.weights import Manifest, StagingPlace
from segue.weights.name_table import Box, Slice
from segue.weights.sync.live import LiveWeights, box_of
from segue.weights.sync.manifest import bucket_bytes, first, tensors
from segue.weights.sync.memory import Staging, StagingMemory
from segue.weights.sync.tensors import are_finite, as_sent, copy_into, equal

_WARM = 1 << 20  # elements


class StagedWeights:
    """All that one session brings."""

    def __init__(self, live: LiveWeights, memory: StagingMemory) -> None:
        self.live = live
        self.names: set[str] = set()  # of the checkpoint, none of them stacked
        self.note = ""
        self.num_bytes = 0
        self._memory = memory
        self._stagings: list[Staging] = []
        self._whole: Arena | None = None
        self._views: dict[str, Tensor] = {}  # parameter, or tied name -> where it is staged

    @property
    def memory(self) -> StagingMemory:
        """Where the memory comes from."""
        return self._memory

    @property
    def place(self) -> str:
        """Where the weights are staged: `device`, `host`, or `none` while there are none."""
        places = {staging.place for staging in self._stagings}
        return "host" if "host" in places else "device" if places else "none"

    @property
    def parameters(self) -> list[str]:
        """Ours, those staged."""
        return [name for name in self._views if name not in self.live.table.aliases]

    @property
    def whole(self) -> Arena:
        """The arena of a session that took memory for all weights at once."""
        assert self._whole is not None
        return self._whole

    def add(self, names: Iterable[str], place: StagingPlace = "auto", landing: int = 0) -> None:
        """Take memory for what `names` of the checkpoint write, unless it was taken before.

        What they do not write of a parameter is as in the live one. `landing`: see `StagingMemory.take`.

        Raises:
            OutOfMemoryError: there is too little memory; says how many bytes are missing.
        """
        table = self.live.table
        names = list(names)
        aliases = [name for name in names if name in table.aliases and name not in self._views]
        written = {
            each for name in names if name not in table.aliases for each in table.stacked.get(name, (name,))
        }
        touched = {part.parameter for name in written for part in table.slices[name]}
        new = [spec for spec in self.live.specs if spec.name in touched and spec.name not in self._views]
        if new:
            self._take(None if len(new) == len(table.parameters) else new, new, place, landing)
        if aliases:
            tied = [self._tied_spec(name) for name in aliases]
            self._take(tied, tied, place, 0)
        self.names |= written
        with self._memory.on_stream():
            for spec in new:
                self._prepare(spec.name)
        self._memory.synchronize()

    def view(self, parameter: str) -> Tensor:
        """The staged parameter."""
        return self._views[parameter]

    def parts(self, name: str) -> Iterator[tuple[Tensor, Box]]:
        """Where the slices that this rank takes of checkpoint tensor `name` are staged."""
        meaning = self.live.table.aliases.get(name)
        for part in self.live.table.slices[meaning or name]:
            if meaning is None:
                yield box_of(self._views[part.parameter], part.destination, len(part.source)), part.source
            else:
                yield self._views[name], part.source

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Live memory, and the staged memory to be copied there."""
        live = self.live.arena
        if self._whole is not None:
            return list(zip(live.slabs, self._whole.slabs, strict=True))
        return [(live.view(name), self._views[name]) for name in self.parameters]

    def problems(self, names: Collection[str]) -> list[str]:
        """What is wrong with the values staged of `names`: not finite, or tied and yet different."""
        with self._memory.on_stream():
            return [*self._not_finite(names), *self._untied(names)]

    def release(self, *, in_use: bool = False) -> None:
        """Give the memory back; what is `in_use` to whoever uses it, for good."""
        self._views.clear()
        for staging in self._stagings:
            self._memory.give_back(staging, in_use=in_use)
        self._stagings.clear()
        self._whole = None
        self.names.clear()
        self.num_bytes = 0

    def _take(
        self, specs: list[TensorSpec] | None, new: list[TensorSpec], place: StagingPlace, landing: int
    ) -> None:
        staging = self._memory.take(specs, place, landing)
        self._stagings.append(staging)
        if specs is None:
            self._whole = staging.arena
        self.note = staging.note or self.note
        self.num_bytes += sum(spec.num_bytes for spec in new)
        for spec in new:
            self._views[spec.name] = staging.arena.view(spec.name)

    def _tied_spec(self, name: str) -> TensorSpec:
        rows = [part.source[0] for part in self.live.table.slices[self.live.table.aliases[name]]]
        shape = (sum(box.stop - box.start for box in rows), self.live.config.hidden_size)
        return TensorSpec(name=name, shape=shape, dtype=self.live.dtype)

    def _prepare(self, parameter: str) -> None:
        view = self._views[parameter]
        if not self.live.writers[parameter] <= self.names:
            copy_into(view, self.live.arena.view(parameter))
        elif parameter in self.live.table.padding:
            view[self.live.table.padding[parameter]].zero_()

    def _not_finite(self, names: Collection[str]) -> list[str]:
        table = self.live.table
        parameters = list({part.parameter for name in names for part in table.slices.get(name, ())})
        found = are_finite([self._views[name] for name in parameters], self.live.dtype)
        bad = {name for name, finite in zip(parameters, found, strict=True) if not finite}
        return [
            _not_finite(name, self.live.dtype)
            for name in names
            if any(part.parameter in bad for part in table.slices.get(name, ()))
            and not all(are_finite([view for view, _ in self.parts(name)], self.live.dtype))
        ]

    def _untied(self, names: Collection[str]) -> list[str]:
        table, found = self.live.table, []
        for name, meaning in table.aliases.items():
            if name not in names:
                continue
            for part in table.slices[meaning]:
                held = self._views.get(part.parameter, self.live.arena.view(part.parameter))
                if not equal(self._views[name], held[part.destination], self.live.dtype):
                    found.append(_untied(name, meaning))
        return found


class Incoming:
    """Takes the tensors of one manifest as they arrive from a sender; one rank's `Sink`."""

    def __init__(self, staged: StagedWeights, manifest: Manifest, device: torch.device) -> None:
        """Take memory for all that `manifest`, a checked one, brings to `device`: the host with gloo.

        Raises:
            OutOfMemoryError: there is too little memory; says how many bytes are missing.
        """
        self._staged = staged
        self._checksums = manifest.checksums or {}
        self._device = device
        self._wire = {name: (getattr(torch, dtype), shape) for name, dtype, shape in tensors(manifest)}
        self._digests: dict[str, Tensor] = {}
        landing = 2 * max(map(bucket_bytes, manifest.buckets), default=0)
        staged.add(self._wire, manifest.staging, landing)
        self._warm_up()

    def direct(self, name: str) -> Tensor | None:
        """The staged place of all of tensor `name`, in the wire's dtype; None where it is cut or cast."""
        dtype, shape = self._wire[name]
        parts = list(self._staged.parts(name))
        if len(parts) != 1:
            return None
        view, source = parts[0]
        is_whole = source == tuple(slice(0, size) for size in shape)
        fits = view.dtype == dtype and view.device.type == self._device.type and view.is_contiguous()
        return view if is_whole and fits else None

    def take(self, name: str, tensor: Tensor) -> None:
        """Keep what this rank needs of `tensor`, whole and in the wire's dtype.

        It may be the place that `direct` gave. Else its memory may be written again: on CUDA behind what the
        current stream has been given so far, by which it is written too.
        """
        place = self.direct(name)
        if place is not None and place.data_ptr() == tensor.data_ptr():
            return
        with self._staged.memory.on_stream():
            if name in self._checksums:
                self._digests[name] = digest(tensor.contiguous())
            for view, source in self._staged.parts(name):
                copy_into(view, tensor[source])
        stream = self._staged.memory.stream
        if stream is not None:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def finish(self) -> list[str]:
        """What is wrong with what has arrived, by name. On CUDA the receiving stream is done by now."""
        problems = []
        with self._staged.memory.on_stream():
            for name, expected in self._checksums.items():
                if name not in self._digests:
                    place = self.direct(name)
                    assert place is not None
                    self._digests[name] = digest(place)
                found = int(self._digests[name]) & MASK
                if found != expected & MASK:
                    problems.append(
                        f"{name!r} has checksum {found}, not {expected & MASK} as it was announced"
                    )
        self._staged.memory.synchronize()
        return first([*problems, *self._staged.problems(self._wire.keys())])

    def _warm_up(self) -> None:
        """Load the kernels and take the temporary memory of `take`: not while a receive is open."""
        memory, live = self._staged.memory, self._staged.live
        if memory.stream is None or self._device.type != "cuda":
            return
        with memory.on_stream():
            for dtype in {dtype for dtype, _ in self._wire.values()}:
                sent = torch.zeros(4, _WARM, dtype=dtype, device=memory.device)
                kept = torch.empty(4, _WARM, dtype=live.dtype, device=memory.device)
                half = _WARM // 2
                for to, source in ((kept, sent), (kept[:, :half], sent[:, half:])):
                    copy_into(to, source)
                    as_sent(source, live.dtype)
                if self._checksums:
                    digest(sent)
        memory.synchronize()


class Borrowed:
    """Tensors that are not copied before they are committed."""

    def __init__(self, live: LiveWeights, memory: StagingMemory, tensors: dict[str, Tensor]) -> None:
        """`tensors`: by checkpoint name, known and of the right shape, where the weights are."""
        self._live = live
        self._memory = memory
        self._tensors = tensors

    @property
    def parameters(self) -> set[str]:
        """Ours, those written in part at least."""
        slices = self._live.table.slices
        return {part.parameter for name in self._tensors for part in slices.get(name, ())}

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Live memory, and the slices to be copied there."""
        return [
            (
                box_of(self._live.arena.view(part.parameter), part.destination, len(part.source)),
                tensor[part.source],
            )
            for name, tensor in self._tensors.items()
            for part in self._live.table.slices.get(name, ())
        ]

    def problems(self) -> list[str]:
        """What is wrong with the values: not finite, or tied and yet different."""
        table, dtype = self._live.table, self._live.dtype
        found = []
        with self._memory.on_stream():
            for name, tensor in self._tensors.items():
                meaning = table.aliases.get(name)
                slices = [tensor[part.source] for part in table.slices[meaning or name]]
                if not all(are_finite(slices, dtype)):
                    found.append(_not_finite(name, dtype))
                if meaning is not None and not all(
                    equal(mine, self._held(meaning, part), dtype)
                    for mine, part in zip(slices, table.slices[meaning], strict=True)
                ):
                    found.append(_untied(name, meaning))
        return found

    def _held(self, meaning: str, part: Slice) -> Tensor:
        if meaning in self._tensors:
            return self._tensors[meaning][part.source]
        return box_of(self._live.arena.view(part.parameter), part.destination, len(part.source))


def _not_finite(name: str, dtype: torch.dtype) -> str:
    return f"{name!r} has values that are not finite in {str(dtype).removeprefix('torch.')}"


def _untied(name: str, meaning: str) -> str:
    return f"{name!r} differs from {meaning!r}, to which this model ties it: send either, or both equal"
