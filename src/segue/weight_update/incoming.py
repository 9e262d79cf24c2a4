"""Tensors from a trainer: staged one after the other as they are received, or committed without a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from segue.memory.checksum import MASK, digest
from segue.memory.tensor_ops import Copies, are_finite, as_sent, box_of, copy_into, equal, is_groupable
from segue.messages.weight_operations import Manifest
from segue.models.weight_map import Slice
from segue.weight_update.manifest import first, receive_buffer_bytes, tensors
from segue.weight_update.served import ServedWeights
from segue.weight_update.staging import StagedWeights, not_finite, untied
from segue.weight_update.staging_memory import StagingMemory, check_host

_WARM = 1 << 20  # elements


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
            receive_buffer: bytes of the receiver's buffers there; fewer are needed if tensors are `direct`.

        Raises:
            OutOfMemoryError: there is too little memory; the message says how many bytes are missing.
        """
        self._staged = staged
        self._checksums = manifest.checksums or {}
        self._device = device
        self._sent = {name: (getattr(torch, dtype), shape) for name, dtype, shape in tensors(manifest)}
        self._digests: dict[str, Tensor] = {}
        if device.type == staged.memory.device.type:
            staged.add(self._sent, manifest.staging, receive_buffer)
            exact = receive_buffer_bytes(manifest, lambda name: self.direct(name) is not None)
            staged.memory.check_receive_buffers(min(receive_buffer, exact))
        else:
            check_host(receive_buffer)
            staged.add(self._sent, manifest.staging)
        self._warm_up()

    def direct(self, name: str) -> Tensor | None:
        """Returns the staging memory of the whole tensor `name`; None if it is kept in part, or cast."""
        dtype, shape = self._sent[name]
        parts = list(self._staged.parts(name))
        if len(parts) != 1:
            return None
        view, source = parts[0]
        is_whole = source == tuple(slice(0, size) for size in shape)
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
            for view, source in self._staged.parts(name):
                copy_into(view, tensor[source])
        stream = self._staged.memory.stream
        if stream is not None:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def prepare(self, tensors: Sequence[tuple[str, Tensor]]) -> Callable[[], None]:
        """Returns a function that stores all these CUDA tensors with few launches, each time it is called."""
        moved, rest = [], []
        for name, tensor in tensors:
            parts = [(view, tensor[source]) for view, source in self._staged.parts(name)]
            if name in self._checksums or not all(is_groupable(*pair) for pair in parts):
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
                if name not in self._digests:
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
                half = _WARM // 2
                for to, source in ((kept, sent), (kept[:, :half], sent[:, half:])):
                    copy_into(to, source)
                    as_sent(source, served.dtype)
                if self._checksums:
                    digest(sent)
        memory.synchronize()


class ZeroCopyTensors:
    """Tensors that are not copied to staging memory: a commit copies them straight to the served weights."""

    def __init__(self, served: ServedWeights, memory: StagingMemory, tensors: dict[str, Tensor]) -> None:
        """`tensors`: by checkpoint name, of known names and right shapes, on the device of the weights."""
        self._served = served
        self._memory = memory
        self._tensors = tensors

    @property
    def parameters(self) -> set[str]:
        """The model's parameters that these tensors write, in whole or in part."""
        slices = self._served.weight_map.slices
        return {part.parameter for name in self._tensors for part in slices.get(name, ())}

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Returns pairs of served memory and the slice to copy there."""
        return [
            (
                box_of(self._served.arena.view(part.parameter), part.destination, len(part.source)),
                tensor[part.source],
            )
            for name, tensor in self._tensors.items()
            for part in self._served.weight_map.slices.get(name, ())
        ]

    def problems(self) -> list[str]:
        """Returns the problems of the values: not finite, or different from a tied tensor."""
        table, dtype = self._served.weight_map, self._served.dtype
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
                if meaning is not None and not equal(mine, self._tied_values(meaning, part), dtype):
                    found.append(untied(name, meaning))
        return first(found)

    def _tied_values(self, meaning: str, part: Slice) -> Tensor:
        if meaning in self._tensors:
            return self._tensors[meaning][part.source]
        return box_of(self._served.arena.view(part.parameter), part.destination, len(part.source))
