"""One weight update: its phase, the calls that wait for it, its deadlines and its figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Literal

from segue.messages.weight_operations import Manifest
from segue.messages.weight_update import EndedUpdate

COPY_S = 600.0  # more than the copy of the last tensors takes
RECEIVE_S, ARM_TIMEOUT_S = 300.0, 3600.0  # how long a session may be silent: after the first byte, before it


class UpdatePhase(Enum):
    """The phase of the open session; ``TRANSITIONS`` says which follow. Any phase may end in failure."""

    STAGING = auto()  # the ranks check the manifest, and take memory for its tensors
    POSTING = auto()  # the ranks enter the first broadcast, or read a checkpoint or a payload
    PREPARED = auto()  # every rank waits for the first byte
    RECEIVING = auto()  # a rank has received something
    RECEIVED = auto()  # every rank has everything and has checked it
    SEALING = auto()  # shared weights: every rank makes what it has staged final
    COMMITTING = auto()  # generation is held, then the ranks write the served weights


# A checkpoint or a payload is RECEIVED as soon as it was read. A group of calls begins as RECEIVED, and each
# of its calls goes through the phases again.
TRANSITIONS: dict[UpdatePhase, tuple[UpdatePhase, ...]] = {
    UpdatePhase.STAGING: (UpdatePhase.POSTING, UpdatePhase.RECEIVED),
    UpdatePhase.POSTING: (UpdatePhase.PREPARED, UpdatePhase.RECEIVED),
    UpdatePhase.PREPARED: (UpdatePhase.RECEIVING,),
    UpdatePhase.RECEIVING: (UpdatePhase.RECEIVED,),
    UpdatePhase.RECEIVED: (
        UpdatePhase.STAGING,
        UpdatePhase.POSTING,
        UpdatePhase.SEALING,
        UpdatePhase.COMMITTING,
    ),
    UpdatePhase.SEALING: (UpdatePhase.COMMITTING,),
    UpdatePhase.COMMITTING: (),
}
BEFORE_PREPARED = (UpdatePhase.STAGING, UpdatePhase.POSTING)
TO_BE_COMMITTED = (UpdatePhase.SEALING, UpdatePhase.COMMITTING)


# How a client asks for the update. "session": it prepares and completes in two calls. "call": one call
# receives or reads, and commits. "group of calls": such calls between a begin and an end, and one commit.
Kind = Literal["session", "call", "group of calls"]
Then = Literal["wait", "answer", "commit"]  # what follows RECEIVED


@dataclass(slots=True, kw_only=True)
class UpdateSession:
    """One update, from its announcement to its end."""

    number: int
    id: str
    kind: Kind
    num_ranks: int
    began: float  # in seconds, as all times
    progress_at: float  # the time of the last phase change or progress report
    phase: UpdatePhase = UpdatePhase.STAGING
    manifest: Manifest | None = None
    weight_version: str | None = None
    timeout_s: float = RECEIVE_S
    arm_timeout_s: float = ARM_TIMEOUT_S
    preparing: list[int] = field(default_factory=list)  # calls to answer at PREPARED
    ending: list[int] = field(default_factory=list)  # calls to answer at the end ("answer": at RECEIVED)
    answer_by: float | None = None  # the deadline of the calls in ``ending``
    then: Then = "wait"
    refusal: str | None = None  # the error that ends the session once everything was received and dropped
    flush_cache: bool = False
    abort_all: bool = False
    has_lease: bool = False  # to write a generation of shared weights
    is_partial: bool = True
    is_empty: bool = True  # no call has brought any tensor
    model_path: str | None = None
    buckets: dict[int, int] = field(default_factory=dict)  # rank -> received buckets
    bytes: dict[int, int] = field(default_factory=dict)  # rank -> received bytes
    bytes_before: int = 0  # in a group of calls: received by the calls before the present one
    buckets_before: int = 0
    receiving_at: float = 0.0  # when RECEIVING began
    receive_s: float = 0.0  # seconds in RECEIVING, over all calls
    done: set[int] = field(default_factory=set)  # ranks that have everything
    staging: dict[str, Any] = field(default_factory=dict)
    num_paused: int = 0
    times: dict[str, float] = field(default_factory=dict)  # phase, "WRITING" or "SERVED" -> when it began

    def enter(self, phase: UpdatePhase, now: float) -> bool:
        """Enter a phase, or note progress in the present one; returns whether the phase is another one."""
        is_new = phase is not self.phase
        assert not is_new or phase in TRANSITIONS[self.phase], f"{self.phase.name} -> {phase.name}"
        self.phase, self.progress_at = phase, now
        self.times.setdefault(phase.name, now)
        return is_new

    def begin_call(self, manifest: Manifest | None = None) -> None:
        """Note that one more call brings tensors, by broadcasts if it has a manifest.

        What was received for earlier calls of a group is added to `bytes_before` and `buckets_before`.
        """
        self.is_empty = self.is_empty and manifest is not None and not manifest.buckets
        if manifest is not None:
            self.manifest, self.is_partial = manifest, self.is_partial and manifest.partial
        self.bytes_before += self.slowest(self.bytes)
        self.buckets_before += self.slowest(self.buckets)
        self.buckets, self.bytes, self.done = {}, {}, set()

    @property
    def group_name(self) -> str | None:
        """The group whose broadcasts the session receives; None if it receives none."""
        return None if self.manifest is None else self.manifest.group_name

    @property
    def num_buckets(self) -> int:
        """The number of buckets that were announced."""
        return 0 if self.manifest is None else len(self.manifest.buckets)

    @property
    def deadline(self) -> float | None:
        """When the session is given up if nothing happens before; None while it is committed."""
        if self.phase is UpdatePhase.COMMITTING:
            return None
        # `timeout_s` limits the silence in RECEIVING, `arm_timeout_s` that before it and after it.
        silence = self.progress_at + (
            self.timeout_s if self.phase is UpdatePhase.RECEIVING else self.arm_timeout_s
        )
        return silence if self.answer_by is None else min(silence, self.answer_by)

    @property
    def gloo_timeout_s(self) -> float:
        """Longer than any broadcast of a session: both silences, and the time to copy the last tensors."""
        return self.arm_timeout_s + 2 * self.timeout_s + COPY_S

    def lateness(self, now: float) -> str:
        """Why the session was given up at ``now``: the error text."""
        silent = now - self.progress_at
        if self.answer_by is not None and now >= self.answer_by:
            return f"not everything was received within timeout_s={self.timeout_s:g} of the call to complete"
        if self.phase is UpdatePhase.RECEIVING:
            return f"nothing was received for {silent:.0f} s, the limit set by timeout_s={self.timeout_s:g}"
        what = "no commit came" if self.phase is UpdatePhase.RECEIVED else "nothing was received"
        return f"{what} within {silent:.0f} s, the limit set by arm_timeout_s={self.arm_timeout_s:g}"

    def slowest(self, counts: dict[int, int]) -> int:
        """The count of the rank that has received the least."""
        return min(counts.get(rank, 0) for rank in range(self.num_ranks))

    def figures(self) -> dict[str, Any]:
        """The figures for the answers to the calls of the session; timings in seconds."""
        num_bytes, receive = self.bytes_before + self.slowest(self.bytes), self.receive_s
        return {
            "session_id": self.id,
            "num_buckets_received": self.buckets_before + self.slowest(self.buckets),
            "num_bytes": num_bytes,
            "gb_per_s": num_bytes / receive / 1e9 if receive else 0.0,
            "num_paused_requests": self.num_paused,
            "staging": self.staging,
            "timings": {
                "prepare_s": self._seconds("STAGING", "PREPARED"),
                "receive_s": receive,
                "commit_s": self._seconds("COMMITTING", "SERVED"),  # since no further step was planned
                "write_s": self._seconds("WRITING", "SERVED"),  # the time in which nothing was generated
                "total_s": max(self.times.values(), default=self.began) - self.began,
            },
        }

    def record(self, now: float, error: str | None = None) -> EndedUpdate:
        """Return when the session, which ends now, went through its phases; ``error``: why it has failed."""
        num_bytes = self.bytes_before + self.slowest(self.bytes)
        return EndedUpdate(
            id=self.id,
            kind=self.kind,
            began=self.began,
            ended=now,
            times=dict(self.times),
            num_bytes=num_bytes,
            error=error,
        )

    def _seconds(self, start: str, end: str) -> float:
        """Returns the seconds from the beginning of one entry of `times` to another; 0 if one is missing."""
        return self.times[end] - self.times[start] if start in self.times and end in self.times else 0.0
