"""Memory of a rank that can be given back to the system, and taken again at the same addresses.

Weights and KV cache live in windows. Tensors and CUDA graphs stay valid while their memory is away; nothing
may access it then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from segue.errors import OutOfMemoryError, SlabMemoryError
from segue.host import free_cpu_memory
from segue.memory.arena import SLAB_BYTES, Arena, Layout
from segue.memory.binding import tensor_at
from segue.memory.budget import gib
from segue.memory.cuda_vmm import CudaVMM
from segue.memory.memfd import MemfdVMM
from segue.memory.rank_memory import PrivateMemory
from segue.memory.vmm import VMM
from segue.memory.window import MemoryWindow
from segue.messages.memory import MemoryTag
from segue.sizes import round_up

WAKE_SHARE = 0.8  # of the time of a wake, that may be spent on waiting for memory
RETRY_MEMORY_S = 0.05  # the memory of a process that was killed is free within 0.1 s


class ReleasableMemory(PrivateMemory):
    """Memory of this process alone, whose weights and KV cache can be released."""

    def __init__(self, device: torch.device, *, parks_kv: bool = False) -> None:
        """Serve a device; with `parks_kv` the KV cache has only its scratch page until `wake`."""
        super().__init__(device)
        self.parks_kv = self._is_parked = parks_kv
        self._vmm: VMM = MemfdVMM() if device.type == "cpu" else CudaVMM(device.index, self._synchronise)
        self._ranges: dict[MemoryTag, _Range] = {}

    def load(self, layout: Layout, fill: Callable[[Callable[[], Arena]], None]) -> Arena:
        """See `RankMemory.load`; memory is taken when `fill` first asks for the arena, and not before."""

        @cache
        def take() -> Arena:
            held = self._reserve("weights", layout.sizes)
            self._map(held)
            return Arena(layout, held.tensors)

        fill(take)
        return take()

    def take_kv(self, num_bytes: int, scratch_bytes: int = 0) -> Tensor:
        """See `RankMemory.take_kv`. An access to what is not there yet is a fault.

        Raises:
            SlabMemoryError: the device has too little memory.
        """
        held = self._reserve("kv_cache", [num_bytes])
        (kv,) = held.tensors
        first = num_bytes - scratch_bytes if self._is_parked else 0
        self._map(held, first // self._vmm.granularity * self._vmm.granularity)
        if self.device.type == "cuda":
            kv[first:].zero_()
        return kv

    def wake(self, epoch: int = 0, timeout_s: float = 0.0) -> None:
        """See `RankMemory.wake`: the KV cache gets the rest of its memory.

        Raises:
            SlabMemoryError: the device has too little memory; the scratch page is away too then.
        """
        if not self._is_parked:
            return
        self._is_parked = False
        window, deadline = self._ranges["kv_cache"].window, time.monotonic() + WAKE_SHARE * timeout_s
        window.clear()
        while True:
            try:
                self.map(["kv_cache"])
                return
            except SlabMemoryError as error:  # that of an engine that has ended comes back a moment later
                if time.monotonic() >= deadline:
                    raise self._too_little(window.size) from error
            time.sleep(RETRY_MEMORY_S)

    def unmap(self, tag: MemoryTag, *, backup: bool = False) -> int:
        """Give memory back, and return its bytes; 0 if it is away already.

        All work that uses it must have been queued on the current stream. With `backup` its contents are
        kept in the host's memory, and come back with `map`.

        Raises:
            OutOfMemoryError: the host has no memory for the backup; nothing is given back.
        """
        held = self._ranges[tag]
        num_bytes = held.window.mapped_bytes
        if num_bytes:
            held.backup = self._copy(held.tensors) if backup else None
            held.window.clear()
        return num_bytes

    def map(self, tags: Sequence[MemoryTag]) -> int:
        """Take memory again, all of it or none, and return its bytes; what is here already stays.

        Contents without a backup are zero.

        Raises:
            SlabMemoryError: there is too little memory.
            SharedMemoryError: it cannot be mapped.
        """
        away = [self._ranges[tag] for tag in tags if not self._ranges[tag].window.mapped_bytes]
        try:
            for held in away:
                self._map(held)
        except BaseException:
            for held in away:
                held.window.clear()
            raise
        for held in away:
            if held.backup is not None:
                for tensor, copy in zip(held.tensors, held.backup, strict=True):
                    tensor.copy_(copy)
                held.backup = None
            elif self.device.type == "cuda":
                for tensor in held.tensors:
                    tensor.zero_()
        return sum(held.window.mapped_bytes for held in away)

    def has_backup(self, tag: MemoryTag) -> bool:
        """Whether memory that is away comes back with its contents."""
        return self._ranges[tag].backup is not None

    def close(self) -> None:
        """See `RankMemory.close`."""
        for held in self._ranges.values():
            held.window.close()
        self._ranges.clear()

    def _reserve(self, tag: MemoryTag, sizes: Sequence[int]) -> _Range:
        """Reserve a window with one tensor of bytes per size; nothing is mapped yet."""
        rounded = [round_up(size, self._vmm.granularity) for size in sizes]
        window = MemoryWindow(self._vmm, sum(rounded))
        starts = [sum(rounded[:index]) for index in range(len(rounded))]
        tensors = [
            tensor_at(window.address + start, size, self.device)
            for start, size in zip(starts, sizes, strict=True)
        ]
        self._ranges[tag] = held = _Range(window, tensors)
        return held

    def _map(self, held: _Range, first: int = 0) -> None:
        """Map a range from the offset `first` on, in slabs that the device can surely have in one piece."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the driver cannot take what torch keeps for later
        for start in range(first, held.window.size, SLAB_BYTES):
            slab = self._vmm.private(min(SLAB_BYTES, held.window.size - start))
            try:
                held.window.map(start, slab, writable=True)
            finally:
                self._vmm.close(slab)  # the mapping keeps the memory

    def _too_little(self, needed: int) -> SlabMemoryError:
        """Return the error of an engine that cannot have its KV cache."""
        on_cpu = self.device.type == "cpu"
        free = free_cpu_memory() if on_cpu else torch.cuda.mem_get_info(self.device)[0]
        return SlabMemoryError(
            f"the KV cache of an engine that wakes needs {gib(needed)}, but only {gib(free)} is free on "
            f"{self.device}: {gib(max(0, needed - free))} are missing. End the processes that have it, such "
            "as the engine before; or end all engines of the cohort, and start them with a lower "
            "--memory-ratio or --num-kv-tokens"
        )

    def _copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors to the host's memory."""
        needed = sum(tensor.nbytes for tensor in tensors)
        if (missing := needed - free_cpu_memory()) > 0:
            raise OutOfMemoryError(
                f"the backup of the weights needs {gib(needed)} of the host's memory, and {gib(missing)} are "
                "missing; free memory, or release the weights without a backup (/sleep?level=2)"
            )
        return [tensor.to("cpu", copy=True) for tensor in tensors]

    def _synchronise(self) -> None:
        # Only this stream: another one may wait for a peer that sends weights.
        torch.cuda.current_stream(self.device).synchronize()


class _Range:
    """A window, and the tensors that are bound to it."""

    def __init__(self, window: MemoryWindow, tensors: list[Tensor]) -> None:
        self.window = window
        self.tensors = tensors
        self.backup: list[Tensor] | None = None  # the contents while the memory is away
