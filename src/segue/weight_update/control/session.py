"""One update of the weights: how far it is, who waits for it, and what is told of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Literal

from segue.messages.weight_operations import Manifest

COPY_S = 600.0
RECEIVE_S, ARMED_S = 300.0, 3600.0  # how long a session waits: after the first byte, before it


class UpdatePhase(Enum):
    """How far the open session is."""

    STAGING = auto()  # the ranks check what was announced, and take memory for it
    POSTING = auto()  # they enter the first broadcast, or read what came another way
    PREPARED = auto()  # every rank waits for the first byte
    RECEIVING = auto()
    RECEIVED = auto()  # every rank has everything, checked
    COMMITTING = auto()  # generation is held, then the ranks write


Kind = Literal["session", "call", "group of calls"]
Then = Literal["wait", "answer", "commit", "refuse"]  # what follows once everything is there


@dataclass(slots=True, kw_only=True)
class UpdateSession:
    """One update, from its announcement to its end."""

    number: int
    id: str
    kind: Kind
    phase: UpdatePhase
    began: float  # seconds, as all times
    progress_at: float  # the last sign of life
    manifest: Manifest | None = None
    weight_version: str | None = None
    timeout_s: float = RECEIVE_S
    arm_timeout_s: float = ARMED_S
    preparing: list[int] = field(default_factory=list)  # calls that want to know when it is prepared
    ending: list[int] = field(default_factory=list)  # calls that want to know how it ends
    answer_by: float | None = None  # the deadline of those
    then: Then = "wait"
    refusal: str = ""  # what is said once everything was received for nothing
    flush_cache: bool = False
    abort_all: bool = False
    is_partial: bool = True
    is_empty: bool = True  # nothing has been brought yet
    model_path: str | None = None
    buckets: dict[int, int] = field(default_factory=dict)  # rank -> received
    bytes: dict[int, int] = field(default_factory=dict)
    bytes_before: int = 0  # of calls before, in a group of them
    buckets_before: int = 0
    receiving_at: float = 0.0
    receive_s: float = 0.0  # over all calls
    done: set[int] = field(default_factory=set)  # ranks that have everything
    staging: dict[str, Any] = field(default_factory=dict)
    num_paused: int = 0
    times: dict[str, float] = field(default_factory=dict)  # when each phase, and each part of it, began

    @property
    def group_name(self) -> str | None:
        """The group whose broadcasts it receives."""
        return None if self.manifest is None else self.manifest.group_name

    @property
    def deadline(self) -> float | None:
        """When it is given up, if nothing happens before; None while it is committed."""
        if self.phase is UpdatePhase.COMMITTING:
            return None
        silence = self.progress_at + (
            self.timeout_s if self.phase is UpdatePhase.RECEIVING else self.arm_timeout_s
        )
        return silence if self.answer_by is None else min(silence, self.answer_by)

    @property
    def longest_s(self) -> float:
        """What no broadcast takes: silence before the first and behind it, and time to copy the last."""
        return self.arm_timeout_s + 2 * self.timeout_s + COPY_S

    def lateness(self, now: float) -> str:
        """Why it was given up at ``now``."""
        silent = now - self.progress_at
        if self.answer_by is not None and now >= self.answer_by:
            return f"not everything was received within timeout_s={self.timeout_s:g} of the call to complete"
        if self.phase is UpdatePhase.RECEIVING:
            return f"nothing was received for {silent:.0f} s, the limit set by timeout_s={self.timeout_s:g}"
        what = "nobody committed it" if self.phase is UpdatePhase.RECEIVED else "nothing was received"
        return f"{what} within {silent:.0f} s, the limit set by arm_timeout_s={self.arm_timeout_s:g}"

    def slowest(self, counts: dict[int, int], num_ranks: int) -> int:
        """The least of what the ranks have received."""
        return min(counts.get(rank, 0) for rank in range(num_ranks))

    def figures(self, num_ranks: int) -> dict[str, Any]:
        """What is told of it at its end; seconds of each part."""
        num_bytes, receive = self.bytes_before + self.slowest(self.bytes, num_ranks), self.receive_s
        return {
            "session_id": self.id,
            "num_buckets_received": self.buckets_before + self.slowest(self.buckets, num_ranks),
            "num_bytes": num_bytes,
            "gb_per_s": num_bytes / receive / 1e9 if receive else 0.0,
            "num_paused_requests": self.num_paused,
            "staging": self.staging,
            "timings": {
                "prepare_s": self._seconds("STAGING", "PREPARED"),
                "receive_s": receive,
                "commit_s": self._seconds("COMMITTING", "LIVE"),  # from when no further step was planned
                "write_s": self._seconds("WRITING", "LIVE"),  # nothing was generated for so long
                "total_s": max(self.times.values(), default=self.began) - self.began,
            },
        }

    def _seconds(self, start: str, end: str) -> float:
        return self.times[end] - self.times[start] if start in self.times and end in self.times else 0.0
