"""The memory by which a worker and the processes that follow its guided requests tell each other of steps.

All of it is plain memory that several processes map. What a counter announces is written before the counter,
and x86 processors show the writes of one processor in order; on others no such processes are used. They may
do a read before a write in front of it. So a process that falls asleep just when a step is posted may see it
only when it looks again, a tenth of a second later; in four million tries that never happened.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np

from segue.guided.grammars import MAX_REASON_CHARS

RING = 8  # steps that may be posted and not yet consumed; one or two are
_REASON_BYTES = 4 * MAX_REASON_CHARS + 4
_LINE = 8  # numbers per process, so that each has a line of the cache to itself


class Board:
    """Views of the memory, for so many processes and request slots."""

    def __init__(self, descriptor: int, num_processes: int, num_slots: int) -> None:
        """Map the memory of a descriptor, whose size is that of `num_bytes`."""
        views, self.num_bytes = _layout(num_processes, num_slots)
        self._memory = mmap.mmap(descriptor, self.num_bytes, flags=mmap.MAP_SHARED)
        made: dict[str, Any] = {
            name: np.ndarray(shape, dtype, self._memory, offset)
            for name, (shape, dtype, offset) in views.items()
        }
        # By the worker: messages sent to each process, or about to be; steps posted; and per step its guided
        # rows: slots, numbers of the guides, and tokens.
        self.sent, self.posted, self.counts = made["sent"], made["posted"], made["counts"]
        self.slots, self.guides, self.tokens = made["slots"], made["guides"], made["tokens"]
        # By each process: whether its vocabulary is prepared; messages heard; steps consumed, and done with
        # their masks; whether it sleeps; when the last step was seen and consumed, and its masks were done.
        self.ready, self.heard = made["ready"], made["heard"]
        self.consumed, self.done = made["consumed"], made["done"]
        self.asleep, self.stamps = made["asleep"], made["stamps"]
        self.complete = made["complete"]  # per step and row, whether its grammar is complete
        # By slot: the guide that has failed last, and why.
        self.failed, self._lengths, self._reasons = made["failed"], made["lengths"], made["reasons"]

    def begin_behind(self, step: int) -> None:
        """Let all processes, which have not started yet, be done with this step."""
        self.posted[:] = self.consumed[:] = self.done[:] = step

    def fail(self, slot: int, guide: int, reason: str) -> None:
        """Note why a slot's guide cannot go on."""
        encoded = reason.encode("utf-8", "replace")[:_REASON_BYTES]
        self._reasons[slot, : len(encoded)] = np.frombuffer(encoded, dtype=np.uint8)
        self._lengths[slot] = len(encoded)
        self.failed[slot] = guide

    def reason(self, slot: int) -> str:
        """Return why the slot's guide that failed last did so."""
        return bytes(self._reasons[slot, : self._lengths[slot]]).decode("utf-8", "replace")


def create(num_processes: int, num_slots: int) -> int:
    """Return the descriptor of zeroed memory for a board."""
    descriptor = os.memfd_create("segue-guided")
    os.ftruncate(descriptor, _layout(num_processes, num_slots)[1])
    return descriptor


def _layout(processes: int, slots: int) -> tuple[dict[str, tuple[tuple[int, ...], Any, int]], int]:
    """Return each view's shape, type and offset, and the bytes of all."""
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        "posted": ((_LINE,), np.int64),
        **dict.fromkeys(
            ("sent", "ready", "heard", "consumed", "done", "asleep"), ((processes, _LINE), np.int64)
        ),
        "stamps": ((processes, _LINE), np.float64),
        "counts": ((RING,), np.int64),
        **{name: ((RING, slots), np.int64) for name in ("slots", "guides", "tokens")},
        "failed": ((slots,), np.int64),
        "lengths": ((slots,), np.int64),
        "complete": ((RING, slots), np.uint8),
        "reasons": ((slots, _REASON_BYTES), np.uint8),
    }
    views, offset = {}, 0
    for name, (shape, dtype) in shapes.items():
        views[name] = (shape, dtype, offset)
        offset += -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // 64) * 64
    return views, offset
