"""The workers as a router knows them, and the requests that it has sent them.

``WorkerView`` and ``FleetSnapshot`` are frozen: whoever learns something makes a new view. ``Holds`` counts
what this router has in flight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from msgspec import structs

from segue.laps.classes import PromptClass
from segue.laps.cost import Coefficients
from segue.messages.fleet import REPORT_PERIOD_S, WorkerRecord, WorkerReport
from segue.router.breaker import Breaker

SILENT_S = 3.0  # a worker that reports nothing for longer hangs, and so does one without heartbeats
# The bandwidth of a pair that has moved nothing yet, in bytes per second: on one host, and between hosts.
SAME_HOST_BYTES_S, BETWEEN_HOSTS_BYTES_S = 10e9, 1e9
# Every server with OpenAI's API answers these alike; not every one has the other routes.
COMMON_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/models"})
ONLY_COMMON = (
    "it is not an engine of Segue, so it gets only /v1/chat/completions, /v1/completions and /v1/models; "
    "add an engine of Segue for other routes"
)
ROUTES_HEADER = (
    "segue-routes"  # of a router's /health, with the value ALL_ROUTES if one of its workers has all
)
ALL_ROUTES = "all"
LAG_S = 0.01  # seconds until a request that was sent is part of the worker's report


def is_common(path: str) -> bool:
    """Whether every worker gets requests of a route, whatever server it is."""
    return path in COMMON_PATHS or path.startswith("/v1/models/")


class CacheName(NamedTuple):
    """Names one prefix cache of one worker: what was in it is not found under another name."""

    incarnation: str
    epoch: int
    version: str  # of the weights
    commits: int
    num_flushes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """All that a router knows of one worker. Times are of the router's monotonic clock, in seconds."""

    record: WorkerRecord
    newest_epoch: int  # the highest of the workers with the same cohort
    connected: bool = True  # whether the connection that the reports come over is open
    is_foreign: bool = False  # whether it is no engine of Segue: record and report are made up
    has_all_routes: bool = (
        True  # whether it has those of an engine; a foreign one may say so, as a router does
    )
    is_drained: bool = False  # whether an operator wants it to get no new requests
    report: WorkerReport | None = None  # the last one; None: there was none yet
    reported_at: float = 0.0
    breaker: Breaker = field(default_factory=Breaker)
    group: PromptClass | None = None  # its group of prefill workers; None: there are no groups
    # Made from the last report:
    coefficients: Coefficients = field(default_factory=Coefficients)
    cache: CacheName | None = None
    kv_kind: tuple[str, ...] = ()  # workers where it is equal can use each other's KV as it is
    refused: Mapping[str, str] = field(default_factory=dict)  # as in `WorkerReport`

    @property
    def id(self) -> str:
        """The worker's id."""
        return self.record.worker_id

    def reported(self, report: WorkerReport, now: float) -> WorkerView:
        """Returns the view once a report has arrived."""
        record, identity = self.record, report.identity
        return replace(
            self,
            report=report,
            reported_at=now,
            newest_epoch=max(self.newest_epoch, report.epoch),
            coefficients=Coefficients(*report.coefficients),
            cache=CacheName(
                record.incarnation, report.epoch, identity.version, identity.commits, report.num_flushes
            ),
            kv_kind=(record.model, record.tokenizer, identity.version, str(identity.commits)),
            refused=report.refused,
        )

    def bytes_per_s_from(self, prefill: WorkerView) -> float:
        """Returns the bandwidth from a prefill worker to this one, as it is taken to be."""
        same_host = prefill.record.boot_id == self.record.boot_id
        return SAME_HOST_BYTES_S if same_host else BETWEEN_HOSTS_BYTES_S

    def why_not(self, now: float) -> str | None:
        """Returns why the worker gets no new request, whatever the request is; None: it may get one."""
        report, epoch = self.report, self.record.epoch
        if epoch < self.newest_epoch:
            return f"its epoch {epoch} was replaced by epoch {self.newest_epoch}"
        if self.is_drained:
            return "it is being drained"
        if not self.connected:
            return "its connection for reports is closed"
        if report is None:
            return "it has not reported yet"
        if report.epoch != epoch:
            return f"it is registered with epoch {epoch}, and reports epoch {report.epoch}"
        if report.state != "active":
            return f"it is {report.state}"
        if report.trouble:
            return report.trouble
        if report.paused:
            return "its generation is paused"
        if report.heartbeat_age_s > SILENT_S:
            return f"its scheduler has sent no heartbeat for {report.heartbeat_age_s:.1f} s"
        return self.breaker.why_not(now)

    @property
    def is_active(self) -> bool:
        """Whether it is the engine of its cohort that serves, even if it takes no request right now."""
        report, epoch = self.report, self.record.epoch
        return (
            report is not None
            and self.connected
            and report.state == "active"
            and report.epoch == epoch == self.newest_epoch
            and report.heartbeat_age_s <= SILENT_S
        )

    def as_if_running(self) -> WorkerView:
        """Returns the view of a worker that is paused as one that is not: it keeps requests until then."""
        if self.report is None or not self.report.paused:
            return self
        return replace(self, report=structs.replace(self.report, paused=False))

    def queued_s(self, now: float) -> float:
        """Returns the reported seconds of waiting work, less the time since then.

        Of that time at most the period of the reports counts: a worker that is silent has not become idle.
        """
        if self.report is None:
            return 0.0
        return max(0.0, self.report.load.queued_s - min(now - self.reported_at, REPORT_PERIOD_S))


class Held(NamedTuple):
    """What a router, or one process of it, has in flight on one worker."""

    num_requests: int = 0
    new_us: int = 0  # predicted microseconds of prefill that the worker's last report does not know of
    new_tokens: int = 0  # tokens of KV, the same

    def plus(self, other: Held) -> Held:
        """Returns both together."""
        return Held(*(here + there for here, there in zip(self, other, strict=True)))


NOTHING_HELD = Held()


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSnapshot:
    """The workers, and this router's requests on them, at one moment."""

    workers: Sequence[WorkerView]
    held: Mapping[str, Held] = field(default_factory=dict)  # by worker; none: nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What one worker is to do for a request, as predicted."""

    worker: WorkerView
    seconds: float  # of prefill, without the wait
    num_tokens: int  # whose KV it will hold
    hit: int  # prompt tokens that its prefix cache is expected to have
    prompt_class: PromptClass | None = None  # None: it computes no prompt, or there are no groups


@dataclass(frozen=True, slots=True)
class Hold:
    """One request on one worker, until its response body has ended."""

    number: int
    worker: str


class _HeldRequest(NamedTuple):
    """What a hold counts for."""

    began: float
    us: int
    tokens: int
    prompt_class: PromptClass | None


class Holds:
    """The requests that this router has in flight, by worker.

    Whoever sends a request takes a hold, and releases it in the ``finally`` of the response's body, whether
    the body ended, broke off or lost its client. Seconds are kept as whole microseconds, so that sums return
    to exactly 0.
    """

    def __init__(self) -> None:
        self._num_taken = 0
        self._entries: dict[str, dict[int, _HeldRequest]] = {}  # by worker and number of the hold
        self._new: dict[str, dict[int, _HeldRequest]] = {}  # those that the last report does not know of
        self._held: dict[str, Held] = {}
        self._pending: dict[PromptClass, int] = {"short": 0, "long": 0}

    def take(self, assignment: Assignment, now: float) -> Hold:
        """Count a request that is sent now."""
        self._num_taken += 1
        worker = assignment.worker.id
        us = round(assignment.seconds * 1e6)
        entry = _HeldRequest(now, us, assignment.num_tokens, assignment.prompt_class)
        for entries in (self._entries, self._new):
            entries.setdefault(worker, {})[self._num_taken] = entry
        self._count(worker, entry, 1)
        held = self._held.get(worker, NOTHING_HELD)
        self._held[worker] = Held(held.num_requests + 1, held.new_us + us, held.new_tokens + entry.tokens)
        return Hold(self._num_taken, worker)

    def release(self, hold: Hold) -> None:
        """End a hold. A second release, and one after the worker has left, has no effect."""
        entry = self._entries.get(hold.worker, {}).pop(hold.number, None)
        if entry is None:
            return
        self._count(hold.worker, entry, -1)
        held = self._held[hold.worker]
        self._held[hold.worker] = held._replace(num_requests=held.num_requests - 1)
        self._forget_new(hold.worker, [hold.number])

    def reported(self, worker: str, now: float) -> None:
        """Note that a report of the worker has arrived: it knows of the requests sent before it was made."""
        known = [n for n, entry in self._new.get(worker, {}).items() if entry.began <= now - LAG_S]
        self._forget_new(worker, known)

    def drop(self, worker: str) -> None:
        """Drop the holds of a worker that has left."""
        for entry in self._entries.pop(worker, {}).values():
            self._count(worker, entry, -1)
        self._new.pop(worker, None)
        self._held.pop(worker, None)

    @property
    def num_requests(self) -> int:
        """The requests in flight."""
        return sum(held.num_requests for held in self._held.values())

    def by_worker(self) -> Mapping[str, Held]:
        """Returns what is in flight now, as a copy."""
        return self._held.copy()

    def pending(self) -> Mapping[PromptClass, int]:
        """Returns the requests of each class whose prompts are in flight, as a copy."""
        return self._pending.copy()

    def _forget_new(self, worker: str, numbers: Iterable[int]) -> None:
        new = self._new.get(worker, {})
        for entry in (new.pop(number) for number in numbers if number in new):
            held = self._held[worker]
            self._held[worker] = Held(
                held.num_requests, held.new_us - entry.us, held.new_tokens - entry.tokens
            )

    def _count(self, worker: str, entry: _HeldRequest, sign: int) -> None:
        if entry.prompt_class is not None:
            self._pending[entry.prompt_class] += sign
