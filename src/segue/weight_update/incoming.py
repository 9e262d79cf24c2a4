"""Tensors that come from outside: received one after the other, or all there at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from segue.memory.checksum import MASK, digest
from segue.memory.tensor_ops import are_finite, as_sent, copy_into, equal
from segue.messages.weight_operations import Manifest
from segue.models.weight_map import Slice
from segue.weight_update.commit import Copies, is_groupable
from segue.weight_update.manifest import first, receive_buffer_bytes, tensors
from segue.weight_update.served import ServedWeights, box_of
from segue.weight_update.staging import StagedWeights, not_finite, untied
from segue.weight_update.staging_memory import StagingMemory, check_host

_WARM = 1 << 20  # elements


class Incoming:
    """Takes the tensors of one manifest as they arrive from a sender; one rank's `Sink`."""

    def __init__(
        self, staged: StagedWeights, manifest: Manifest, device: torch.device, *, receive_buffer: int
    ) -> None:
        """Take memory for all that `manifest`, a checked one, brings to `device`: the host with gloo.

        `receive_buffer`: bytes that the receiver's buffers take there besides, fewer if tensors are `direct`.

        Raises:
            OutOfMemoryError: there is too little memory; says how many bytes are missing.
        """
        self._staged = staged
        self._checksums = manifest.checksums or {}
        self._device = device
        self._wire = {name: (getattr(torch, dtype), shape) for name, dtype, shape in tensors(manifest)}
        self._digests: dict[str, Tensor] = {}
        if device.type == staged.memory.device.type:
            staged.add(self._wire, manifest.staging, receive_buffer)
            exact = receive_buffer_bytes(manifest, lambda name: self.direct(name) is not None)
            staged.memory.check_landing(min(receive_buffer, exact))
        else:
            check_host(receive_buffer)
            staged.add(self._wire, manifest.staging)
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

    def prepare(self, tensors: Sequence[tuple[str, Tensor]]) -> Callable[[], None]:
        """On CUDA: what takes all of these with few launches, whenever they have landed there."""
        moved, rest = [], []
        for name, tensor in tensors:
            parts = [(view, tensor[source]) for view, source in self._staged.parts(name)]
            if name in self._checksums or not all(is_groupable(*pair) for pair in parts):
                rest.append((name, tensor))
            else:
                moved += parts
        copies = Copies(moved, in_background=True)

        def take() -> None:
            copies.write()
            for name, tensor in rest:
                self.take(name, tensor)

        return take

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
        memory, served = self._staged.memory, self._staged.served
        if memory.stream is None or self._device.type != "cuda":
            return
        with memory.on_stream():
            for dtype in {dtype for dtype, _ in self._wire.values()}:
                sent = torch.zeros(4, _WARM, dtype=dtype, device=memory.device)
                kept = torch.empty(4, _WARM, dtype=served.dtype, device=memory.device)
                half = _WARM // 2
                for to, source in ((kept, sent), (kept[:, :half], sent[:, half:])):
                    copy_into(to, source)
                    as_sent(source, served.dtype)
                if self._checksums:
                    digest(sent)
        memory.synchronize()


class ZeroCopyTensors:
    """Tensors that are not copied before they are committed."""

    def __init__(self, served: ServedWeights, memory: StagingMemory, tensors: dict[str, Tensor]) -> None:
        """`tensors`: by checkpoint name, known and of the right shape, where the weights are."""
        self._served = served
        self._memory = memory
        self._tensors = tensors

    @property
    def parameters(self) -> set[str]:
        """Ours, those written in part at least."""
        slices = self._served.table.slices
        return {part.parameter for name in self._tensors for part in slices.get(name, ())}

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Live memory, and the slices to be copied there."""
        return [
            (
                box_of(self._served.arena.view(part.parameter), part.destination, len(part.source)),
                tensor[part.source],
            )
            for name, tensor in self._tensors.items()
            for part in self._served.table.slices.get(name, ())
        ]

    def problems(self) -> list[str]:
        """What is wrong with the values: not finite, or tied and yet different."""
        table, dtype = self._served.table, self._served.dtype
        slices = [
            (name, part, tensor[part.source])
            for name, tensor in self._tensors.items()
            for part in table.slices[table.aliases.get(name, name)]
        ]
        with self._memory.on_stream():
            finite = are_finite([mine for _, _, mine in slices], dtype)
            bad = {name for (name, _, _), is_finite in zip(slices, finite, strict=True) if not is_finite}
            found = [not_finite(name, dtype) for name in self._tensors if name in bad]
            for name, part, mine in slices:
                meaning = table.aliases.get(name)
                if meaning is not None and not equal(mine, self._held(meaning, part), dtype):
                    found.append(untied(name, meaning))
        return first(found)

    def _held(self, meaning: str, part: Slice) -> Tensor:
        if meaning in self._tensors:
            return self._tensors[meaning][part.source]
        return box_of(self._served.arena.view(part.parameter), part.destination, len(part.source))
