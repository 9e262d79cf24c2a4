"""Memory for staged weights: on the device if there is enough, else on the host."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from segue.errors import OutOfMemoryError
from segue.host import free_cpu_memory
from segue.logs import logger
from segue.memory.arena import ALIGNMENT, Arena, Layout, TensorSpec
from segue.memory.budget import gib
from segue.memory.rank_memory import Place, RankMemory
from segue.messages.weight_operations import StagingPlace


@dataclass(frozen=True, slots=True)
class StagingArena:
    """An arena and the place of its memory; on a CPU that is "device"."""

    arena: Arena
    place: Place
    note: str = ""  # why it is on the host and not on the device


class StagingMemory:
    """Allocates the sessions' arenas, and takes them back.

    On CUDA an arena for all weights is kept for the next session: in device memory only if enough was
    reserved, in pinned host memory always, since pinning takes seconds. All other memory goes back to the
    system.
    """

    def __init__(
        self, memory: RankMemory, specs: Sequence[TensorSpec], *, reserved: int = 0, headroom: int = 0
    ) -> None:
        """Allocate the device arena, if enough memory is reserved for it.

        Args:
            memory: of this rank.
            specs: of all weights, in the order of their arena.
            reserved: bytes of device memory that nothing else will ever use.
            headroom: bytes of free device memory that must be left to the steps.
        """
        self.device = device = memory.device
        self._memory = memory
        self._layout = Layout.of(specs)
        self._headroom = headroom
        # A stream of its own: no other stream uses the memory that is allocated on it.
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._kept: dict[str, Arena] = {}  # by place: the arenas of all weights that are never given back
        self._lost: list[Arena] = []  # still in use when they were given back: never unmapped or reused
        needed = self._layout.num_bytes
        if device.type == "cuda" and reserved >= needed:
            self._kept["device"] = self._on_device(self._layout)
        elif device.type == "cuda" and reserved:
            logger.warning(
                "--weight-staging-gb %.2f keeps less device memory free than the weights of this rank take: "
                "%.2f GB; raise it to that",
                reserved / 1e9,
                needed / 1e9,
            )

    def on_stream(self) -> AbstractContextManager[object]:
        """Context in which device operations go to `stream`, behind the current stream's work so far."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.stream)

    def synchronize(self) -> None:
        """Wait until all work of `stream` is done."""
        if self.stream is not None:
            self.stream.synchronize()

    def take(self, specs: Sequence[TensorSpec], place: StagingPlace, receive_buffer: int) -> StagingArena:
        """Returns an arena for `specs`; if these are all weights, it has their order.

        A kept arena is used again if it has all of them. `place` "auto": the device, or else the host.
        `receive_buffer`: bytes that receive buffers will take besides.

        Raises:
            OutOfMemoryError: there is too little memory; the message says how many bytes are missing.
        """
        layout = Layout.of(specs, align=ALIGNMENT)
        is_whole = layout.table.keys() == self._layout.table.keys()
        if is_whole:
            layout = self._layout
        needed = layout.num_bytes
        if self.device.type == "cpu":
            check_host(needed + receive_buffer)
            return StagingArena(self._memory.stage(layout, "device"), "device")
        reason = ""
        if place != "host":
            kept = self._find("device", layout)
            if kept is not None:
                return StagingArena(kept, "device")
            missing = needed + receive_buffer + self._headroom - _free(self.device)
            if missing <= 0:
                try:
                    return StagingArena(self._on_device(layout), "device")
                except torch.OutOfMemoryError:  # the free memory is fragmented
                    missing = needed
            reason = f"{missing} bytes of device memory are missing for staging there"
            if place == "device":
                raise OutOfMemoryError(
                    f"{reason}: use staging='host' or 'auto', or start with a larger --weight-staging-gb"
                )
        arena = self._find("host", layout)
        if arena is None:
            check_host(needed)
            arena = self._memory.stage(layout, "host")
            if is_whole:
                self._kept["host"] = arena
        return StagingArena(arena, "host", reason)

    def check_receive_buffers(self, num_bytes: int) -> None:
        """Raise `OutOfMemoryError` if receive buffers on CUDA would use memory that the steps may need."""
        if self.device.type == "cpu" or not num_bytes:
            return
        missing = num_bytes + self._headroom - _free(self.device)
        if missing > 0:
            raise OutOfMemoryError(
                f"{missing} bytes of device memory are missing for two receive buffers ({num_bytes} bytes): "
                "send smaller buckets, or start with a lower --memory-ratio"
            )

    def give_back(self, staging: StagingArena, *, in_use: bool) -> None:
        """Take an arena back; one that is still `in_use` is never given out again."""
        is_kept = self._kept.get(staging.place) is staging.arena
        if in_use:
            self._lost.append(staging.arena)
            if is_kept:
                del self._kept[staging.place]
        elif not is_kept:
            self._memory.release(staging.arena, staging.place)

    def close(self) -> None:
        """Free the arenas that are kept for the next session."""
        if "host" in self._kept:
            self._memory.release(self._kept["host"], "host")
        self._kept.clear()

    def _find(self, place: str, wanted: Layout) -> Arena | None:
        """Returns the kept arena of `place` if it has all tensors of `wanted`; else None."""
        kept = self._kept.get(place)
        return kept if kept is not None and wanted.table.keys() <= kept.layout.table.keys() else None

    def _on_device(self, layout: Layout) -> Arena:
        """Allocates an arena on `stream`, whose memory no other stream uses."""
        with self.on_stream():
            arena = self._memory.stage(layout, "device")
        self.synchronize()
        return arena


def _free(device: torch.device) -> int:
    """Returns the bytes of device memory that can be allocated, including those in torch's cache."""
    free: int = torch.cuda.mem_get_info(device)[0]
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def check_host(num_bytes: int) -> None:
    """Raise `OutOfMemoryError`, with the missing bytes, unless the host has so much free memory."""
    missing = num_bytes - free_cpu_memory()
    if missing > 0:
        raise OutOfMemoryError(
            f"staging needs {num_bytes} bytes ({gib(num_bytes)}) of host memory, and {missing} are missing; "
            "free memory, lower --num-kv-tokens, or send the weights in several parts"
        )
