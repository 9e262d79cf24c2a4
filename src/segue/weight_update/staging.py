"""New weights beside the served ones: staged as they come in, checked, and not yet committed.

Tensors come under their checkpoint names, and are staged as the parameters of this rank's model, which fuse
several tensors: a part (`Slice`) is a box of a tensor (`source`) and the box of a parameter that it fills
(`destination`). A tied tensor (a head that has to equal the embedding) has an alias as its name, and a
stacked name stands for one tensor of all experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from segue.kernels.fp8 import FP8, expand_scales, has_nan, quantize
from segue.memory.arena import Arena, TensorSpec
from segue.memory.checksum import MASK, digest
from segue.memory.rank_memory import NextWeights
from segue.memory.tensor_ops import Copies, are_finite, as_sent, copy_into, equal, is_groupable
from segue.messages.weight_operations import Manifest, StagingPlace
from segue.models.destination import Destination, rows_at_a_time
from segue.models.weight_map import Slice
from segue.weight_update.manifest import first, tensors
from segue.weight_update.packing import PackedAhead
from segue.weight_update.served import ServedWeights
from segue.weight_update.staging_memory import StagingArena, StagingMemory, check_host
from segue.weight_update.transport.base import plan, receive_buffer_size

_WARM = 1 << 20  # elements


class StagedWeights:
    """All weights of one session, in staging memory."""

    def __init__(self, served: ServedWeights, memory: StagingMemory) -> None:
        self.served = served
        self.names: set[str] = set()  # checkpoint names, none of them stacked
        self.note = ""  # why weights are staged on the host; empty: they are where they were asked for
        self.num_bytes = 0
        self.memory = memory
        self._stagings: list[StagingArena] = []
        # Set if memory for all parameters was allocated at once: a commit then copies slab by slab.
        self.whole: Arena | None = None
        self._views: dict[str, Tensor] = {}  # parameter, or tied checkpoint name -> its staging memory
        # Where parameters are staged that are to take the places of the served ones; None: these are written.
        self.next_weights: NextWeights | None = None
        self.packed = PackedAhead(served)

    @property
    def place(self) -> str:
        """Where the weights are staged: `device`, `host`, or `none` while nothing is staged."""
        if self.next_weights is not None:
            return "device" if self._views else "none"
        places = {staging.place for staging in self._stagings}
        return "host" if "host" in places else "device" if places else "none"

    @property
    def parameters(self) -> list[str]:
        """The model's parameters that are staged."""
        return [name for name in self._views if name not in self.served.weight_map.aliases]

    @property
    def must_stage(self) -> bool:
        """Whether further tensors have to be staged, because others are, or cannot be written in place."""
        return bool(self.parameters) or self.next_weights is not None

    def add(self, names: Iterable[str], place: StagingPlace = "auto", receive_buffer: int = 0) -> None:
        """Allocate memory for the parameters that the checkpoint's `names` write, unless they have some.

        The parts of a parameter that they do not write are copied from the served weights. A tied tensor gets
        memory of its own, in which it is compared with the embedding. A stacked name counts as the names of
        the experts' tensors.
        `receive_buffer`: see `StagingMemory.take`.

        Raises:
            OutOfMemoryError: there is too little memory; the message says how many bytes are missing.
        """
        table = self.served.weight_map
        names = list(names)
        aliases = [name for name in names if name in table.aliases and name not in self._views]
        written = {
            each
            for name in names
            if name not in table.aliases and table.weight_of_scale(name) is None
            for each in table.stacked.get(name, (name,))
        }
        touched = {part.parameter for name in written for part in table.slices[name]}
        touched |= {table.scales[name].name for name in touched & table.scales.keys()}
        self.packed.forget(touched)
        new = [spec for spec in self.served.specs if spec.name in touched and spec.name not in self._views]
        kept: list[str] = []  # parameters that lie beside the new ones
        if new:
            if self.next_weights is None:
                arena = self._take(new, place, receive_buffer)
            else:
                arena, kept = self._take_slabs(self.next_weights, new, place, receive_buffer)
            if len(new) == len(self.served.specs):  # the arena then has the layout of the served one
                self.whole = arena
        if aliases:
            self._take([self._tied_spec(name) for name in aliases], place, receive_buffer=0)
        self.names |= written
        with self.memory.on_stream():
            for name in kept:
                copy_into(arena.view(name), self.served.arena.view(name))
            for spec in new:
                self._prepare(spec.name)
        self.memory.synchronize()

    def parts(self, name: str) -> Iterator[Destination]:
        """Yields the parts of tensor `name` that this rank keeps, in staging memory."""
        meaning = self.served.weight_map.aliases.get(name)
        for part in self.served.weight_map.slices[meaning or name]:
            if meaning is None:
                yield self.served.destination(part, self._views.__getitem__)
            else:
                yield Destination(values=self._views[name], source=part.source)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Returns pairs of served memory and the staged memory to copy there."""
        served = self.served.arena
        if self.whole is not None:
            return list(zip(served.slabs, self.whole.slabs, strict=True))
        return [(served.view(name), self._views[name]) for name in self.parameters]

    def problems(self, names: Collection[str]) -> list[str]:
        """Returns the problems of the staged `names`: not finite values, or a different tied tensor."""
        with self.memory.on_stream():
            return [*self._not_finite(names), *untied(self.served, names, self._tied)]

    def pack(self, is_cancelled: Callable[[], bool]) -> None:
        """Pack what is staged for the layers that keep packed copies, so that the commit need not do it."""
        self.packed.make(self.parameters, self._views.__getitem__, is_cancelled)

    def seal(self) -> None:
        """Make what was staged final, so that it can take the place of the served weights."""
        assert self.next_weights is not None
        with self.memory.on_stream():
            self.next_weights.seal()

    def release(self, *, in_use: bool = False) -> None:
        """Give the memory back; if it is `in_use`, it is kept for its user for ever, and never reused."""
        self.forget(in_use=in_use)
        next_weights, self.next_weights = self.next_weights, None
        if next_weights is not None:
            next_weights.release(in_use=in_use)

    def forget(self, *, in_use: bool = False) -> None:
        """Forget all tensors that were staged; others may be staged in the session."""
        self._views.clear()
        self.packed.clear()
        self.memory.synchronize()
        for staging in self._stagings:
            self.memory.give_back(staging, in_use=in_use)
        self._stagings.clear()
        self.whole = None
        self.names.clear()
        self.num_bytes = 0

    def _take(self, specs: list[TensorSpec], place: StagingPlace, receive_buffer: int) -> Arena:
        """Allocate one arena for parameters or tied tensors, and keep their views by name."""
        staging = self.memory.take(specs, place, receive_buffer)
        self._stagings.append(staging)
        with self.memory.on_stream():
            staging.arena.zero_gaps()
        self.note = staging.note or self.note
        self.num_bytes += sum(spec.num_bytes for spec in specs)
        for spec in specs:
            self._views[spec.name] = staging.arena.view(spec.name)
        return staging.arena

    def _take_slabs(
        self, next_weights: NextWeights, specs: list[TensorSpec], place: StagingPlace, receive_buffer: int
    ) -> tuple[Arena, list[str]]:
        """Take the slabs of parameters; returns the arena, and the other parameters of the new slabs."""
        table = self.served.arena.layout.table
        if self.memory.device.type == "cpu":
            check_host(receive_buffer)
        elif place == "host":
            self.note = "shared weights are staged on the device, in memory of the memory service"
        new = next_weights.take({table[spec.name].slab for spec in specs})
        self.num_bytes += sum(spec.num_bytes for spec in specs)
        for spec in specs:
            self._views[spec.name] = next_weights.arena.view(spec.name)
        return next_weights.arena, [
            name for name, entry in table.items() if entry.slab in new and name not in self._views
        ]

    def _tied_spec(self, name: str) -> TensorSpec:
        """Returns the spec of this rank's rows of a tied tensor, shaped `[rows, hidden_size]`."""
        table = self.served.weight_map
        rows = [part.source[0] for part in table.slices[table.aliases[name]]]
        shape = (sum(box.stop - box.start for box in rows), self.served.config.hidden_size)
        return TensorSpec(name=name, shape=shape, dtype=self.served.dtype)

    def _prepare(self, parameter: str) -> None:
        """Fill what the new tensors will not write: by the served values, or by zeros in padding rows."""
        view = self._views[parameter]
        if not self.served.writers[parameter] <= self.names:
            copy_into(view, self.served.arena.view(parameter))
        elif parameter in self.served.weight_map.padding:
            view[self.served.weight_map.padding[parameter]].zero_()

    def _not_finite(self, names: Collection[str]) -> list[str]:
        """Returns the messages for tensors with infinities or NaN on this rank.

        Whole parameters are checked first, in few launches; only those of a bad parameter tensor by tensor.
        """
        table, dtype = self.served.weight_map, self.served.dtype
        written = {part.parameter for name in names for part in table.slices.get(name, ())}
        fp8 = written & table.scales.keys()  # whether these are finite, their scales tell
        bad = {name for name in fp8 if has_nan(self._views[name])}
        for kind, parameters in (
            (torch.float32, {table.scales[name].name: name for name in fp8}),
            (dtype, {name: name for name in written - fp8}),
        ):
            found = are_finite([self._views[name] for name in parameters], kind)
            bad |= {name for name, finite in zip(parameters.values(), found, strict=True) if not finite}
        return [
            not_finite(name, dtype)
            for name in names
            if any(part.parameter in bad for part in table.slices.get(name, ()))
            and not all(part.is_finite() for part in self.parts(name))
        ]

    def _tied(self, name: str, part: Slice) -> tuple[Tensor, Tensor]:
        """Returns the staged part of a tied tensor, and the embedding's: staged, or else the served one."""
        held = self._views.get(part.parameter, self.served.arena.view(part.parameter))
        return self._views[name], held[part.destination]


class Incoming:
    """Stages the tensors of one manifest as they are received; one rank's `Sink`."""

    def __init__(
        self, staged: StagedWeights, manifest: Manifest, device: torch.device, *, receive_buffer: int
    ) -> None:
        """Allocate staging memory for all tensors of `manifest`, which must have been checked.

        Args:
            staged: the session's weights.
            manifest: of the tensors.
            device: where tensors are received: the host with gloo.
            receive_buffer: bytes of the receiver's buffers there, if no tensor were received directly into
                staging memory; which ones are (`direct`) is known only once that is allocated.

        Raises:
            OutOfMemoryError: there is too little memory; the message says how many bytes are missing.
        """
        self._staged = staged
        self._checksums = manifest.checksums or {}
        self._device = device
        self._sent = {name: (getattr(torch, dtype), shape) for name, dtype, shape in tensors(manifest)}
        self._digests: dict[str, Tensor] = {}
        table = staged.served.weight_map
        # Name of a tensor of scales -> the tensor in FP8 whose scales they are.
        self._scales = {name: weight for name in self._sent if (weight := table.weight_of_scale(name))}
        if device.type == staged.memory.device.type:
            staged.add(self._sent, manifest.staging, receive_buffer)
            exact = 2 * receive_buffer_size(plan(manifest, self, device))
            staged.memory.check_receive_buffers(min(receive_buffer, exact))
        else:  # received on the host, staged on the device: two memories
            check_host(receive_buffer)
            staged.add(self._sent, manifest.staging)
        self._warm_up()

    def direct(self, name: str) -> Tensor | None:
        """Returns the staging memory to receive `name` into; None if it is split, kept in part, or cast."""
        dtype, shape = self._sent[name]
        parts = [] if name in self._scales else list(self._staged.parts(name))
        if len(parts) != 1:
            return None
        view = parts[0].values
        is_whole = parts[0].source == tuple(slice(0, size) for size in shape)
        fits = view.dtype == dtype and view.device.type == self._device.type and view.is_contiguous()
        return view if is_whole and fits else None

    def store(self, name: str, tensor: Tensor) -> None:
        """Copy this rank's shard of `tensor`, which is whole and in its sent dtype, to staging memory.

        `tensor` may be the one that `direct` returned. Any other may be overwritten later: on CUDA the
        current stream waits for the copy, and both writes `tensor` before and overwrites it afterwards.
        """
        target = self.direct(name)
        if target is not None and target.data_ptr() == tensor.data_ptr():
            return
        with self._staged.memory.on_stream():
            if name in self._checksums:
                self._digests[name] = digest(tensor.contiguous())
            for part in self._staged.parts(self._scales.get(name, name)):
                if name in self._scales:
                    part.write_scales(tensor, self._sent[self._scales[name]][1])
                else:
                    part.write(tensor)
        stream = self._staged.memory.stream
        if stream is not None:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def prepare(self, tensors: Sequence[tuple[str, Tensor]]) -> Callable[[], None]:
        """Returns a function that stores what these CUDA tensors, views of a receive buffer, will contain.

        Made before the broadcast is received, so that storing it then takes few launches. Tensors that one
        kernel can copy together (see `is_groupable`) are; the others, and those with a checksum, go one by
        one through `store`.
        """
        moved, rest = [], []
        for name, tensor in tensors:
            is_scale = name in self._scales
            parts = (
                [] if is_scale else [(part.values, tensor[part.source]) for part in self._staged.parts(name)]
            )
            if is_scale or name in self._checksums or not all(is_groupable(*pair) for pair in parts):
                rest.append((name, tensor))
            else:
                moved += parts
        copies = Copies(moved, in_background=True)

        def store() -> None:
            copies.write()
            for name, tensor in rest:
                self.store(name, tensor)

        return store

    def finish(self) -> list[str]:
        """Returns the problems of the received tensors, by name; on CUDA all receives must have ended."""
        problems = []
        with self._staged.memory.on_stream():
            for name, expected in self._checksums.items():
                if name not in self._digests:  # received directly: `store` had nothing to copy
                    target = self.direct(name)
                    assert target is not None
                    self._digests[name] = digest(target)
                found = int(self._digests[name]) & MASK
                if found != expected & MASK:
                    problems.append(f"{name!r} has checksum {found}, but the manifest says {expected & MASK}")
        self._staged.memory.synchronize()
        return first([*problems, *self._staged.problems(self._sent.keys())])

    def _warm_up(self) -> None:
        """Load the kernels of `store` and cache its temporary memory, before any receive is posted."""
        memory, served = self._staged.memory, self._staged.served
        if memory.stream is None or self._device.type != "cuda":
            return
        with memory.on_stream():
            for dtype in {dtype for dtype, _ in self._sent.values()}:
                sent = torch.zeros(4, _WARM, dtype=dtype, device=memory.device)
                kept = torch.empty(4, _WARM, dtype=served.dtype, device=memory.device)
                half = _WARM // 2  # contiguous copies and copies of slices have kernels of their own
                for to, source in ((kept, sent), (kept[:, :half], sent[:, half:])):
                    copy_into(to, source)
                    as_sent(source, served.dtype)
                if self._checksums:
                    digest(sent)
            if self._scales:
                expand_scales(torch.ones(1, device=memory.device), (1, 1), slice(0, 1), slice(0, 1), 0)
            fp8 = [each for name, each in self._sent.items() if served.weight_map.is_fp8(name)]
            for dtype, width in {(dtype, shape[-1]) for dtype, shape in fp8 if dtype != FP8}:
                count = rows_at_a_time(width, memory.device, in_background=True)
                rows = torch.zeros(count, width, dtype=dtype, device=memory.device)
                quantize(rows.to(served.dtype), max(each.block for each in served.weight_map.scales.values()))
        memory.synchronize()


def not_finite(name: str, dtype: torch.dtype) -> str:
    """Returns the message for a tensor with infinities or NaN."""
    return f"{name!r} has values that are not finite in {str(dtype).removeprefix('torch.')}"


def untied(
    served: ServedWeights, names: Collection[str], pair_of: Callable[[str, Slice], tuple[Tensor, Tensor]]
) -> list[str]:
    """Returns the messages for tied tensors (a head and its embedding) that are among `names` and differ.

    `pair_of` returns this rank's part of a tied tensor, and what it must equal.
    """
    lost = served.missing.difference(names)  # an embedding whose memory was released has nothing to compare
    return [
        f"{name!r} differs from {meaning!r}, to which this model ties it: send one of them, or both equal"
        for name, meaning in served.weight_map.aliases.items()
        if name in names and meaning not in lost
        for part in served.weight_map.slices[meaning]
        if not equal(*pair_of(name, part), served.dtype)
    ]
