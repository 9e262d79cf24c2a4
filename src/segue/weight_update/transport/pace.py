"""How fast weights are received over NCCL while the engine generates, whoever sends them.

The kernel of a posted receive keeps SMs of the device from the steps, also while it waits for the trainer. So
receives come in slices: after each one nothing is posted until receives have had no more than their share of
the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

SLICE_BYTES = 256 << 20  # of one slice, unless one broadcast has more
MAX_PAUSE_S = 0.25  # after a slice; a trainer that takes seconds per bucket is not slowed down further


@dataclass
class ReceivePace:
    """Says when the next receive may be posted. One thread uses it.

    ``share`` is the greatest share of the time, above 0 and at most 1, that slices may take while
    ``is_generating`` says that steps run; else there is no limit.
    """

    share: float = 1.0
    is_generating: Callable[[], bool] = lambda: False
    _: KW_ONLY
    clock: Callable[[], float] = time.monotonic  # seconds

    def __post_init__(self) -> None:
        self._began_at = 0.0  # when the first receive of the slice was posted
        self._num_bytes = 0  # posted in the slice
        self._is_open = False  # whether a slice has begun, and has not ended
        self._resume_at = 0.0  # when the next slice may begin

    def may_post(self, num_bytes: int) -> bool:
        """Whether a receive of so many bytes may be posted now."""
        if self.share >= 1.0 or not self.is_generating():
            return True
        if self._is_open:
            return self._num_bytes + num_bytes <= SLICE_BYTES
        return self.clock() >= self._resume_at

    def posted(self, num_bytes: int) -> None:
        """Note a receive that was posted; the first one begins a slice."""
        if not self._is_open:
            self._is_open, self._began_at, self._num_bytes = True, self.clock(), 0
        self._num_bytes += num_bytes

    def drained(self) -> None:
        """Note that no posted receive is left, which ends the slice."""
        if self._is_open:
            now, self._is_open = self.clock(), False
            took_s = now - self._began_at
            self._resume_at = now + min(took_s * (1.0 / self.share - 1.0), MAX_PAUSE_S)
