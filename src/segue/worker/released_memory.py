"""One rank's part in releasing memory: gives it back and takes it again between two steps."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from segue.errors import SegueError
from segue.logs import logger
from segue.memory.releasable import ReleasableMemory
from segue.messages.memory import MapMemory, MemoryCommand, MemoryMoved, UnmapMemory
from segue.models.decoder import Decoder
from segue.weight_update.served import ServedWeights

Submit = Callable[[Callable[[], Any]], Future[Any]]


class ReleasedMemory:
    """Executes each `MemoryCommand` on the stream of the steps, behind those submitted before.

    A copy of the weights may take minutes, in which the loop must answer pings: a rank that is silent for so
    long counts as hung, and is killed.
    """

    def __init__(
        self,
        memory: ReleasableMemory,
        model: Decoder,
        served: ServedWeights,
        submit: Submit,
        send: Callable[[MemoryMoved], None],
    ) -> None:
        """``submit`` queues work that takes long, and does not wait for it."""
        self._memory = memory
        self._model = model
        self._served = served
        self._submit = submit
        self._send = send
        self._on_cpu = memory.device.type == "cpu"

    def handle(self, command: MemoryCommand) -> None:
        """Begin to execute a command and return at once; the reply comes when it is done."""
        self._submit(partial(self._execute, command))

    def _execute(self, command: MemoryCommand) -> None:
        """Execute a command and reply; raises nothing, since later steps would fail too."""
        errors, num_bytes = [], 0
        try:
            num_bytes = self._unmap(command) if isinstance(command, UnmapMemory) else self._map(command)
        except (SegueError, torch.OutOfMemoryError) as error:
            errors = [str(error)]
        except Exception as error:
            logger.exception("memory could not be moved")
            errors = [f"{type(error).__name__}: {error}"]
        rank, fields = self._served.tp.rank, {"num_bytes": num_bytes}
        self._send(MemoryMoved(rank=rank, call=command.call, errors=errors, fields=fields))

    def _unmap(self, command: UnmapMemory) -> int:
        num_bytes = 0
        for tag in command.tags:
            is_weights = tag == "weights"
            moved = self._memory.unmap(tag, backup=is_weights and command.backup)
            num_bytes += moved
            if is_weights and moved:
                self._forget_weights(has_backup=command.backup)
        if self._on_cpu:
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
            if trim is not None:  # glibc: freed copies would stay with the process
                trim(0)
        else:
            torch.cuda.empty_cache()
        return num_bytes

    def _forget_weights(self, *, has_backup: bool) -> None:
        if self._on_cpu:
            self._model.drop_packed()  # as large as the weights
        if not has_backup:
            self._served.note_lost()

    def _map(self, command: MapMemory) -> int:
        is_restored = "weights" in command.tags and self._memory.has_backup("weights")
        num_bytes = self._memory.map(command.tags)
        if is_restored and self._on_cpu:
            self._model.build_derived()
        return num_bytes
