"""What the web page shows of a router: its workers, what became of the requests, and what changes."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec

from segue.frontend.control_log import ControlLog
from segue.router.router import Router
from segue.router.status import WorkerStatus, laps_status, worker_status
from segue.server.webpage_feed import Mean
from segue.version import __version__

FAILED = frozenset(("connect", "cut", "timeout"))  # ends of requests whose worker is to blame


class ShownWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, as the page shows it; None: the router does not know, or it is no engine of Segue."""

    id: str
    state: str
    serves: bool
    reason: str
    breaker: str
    foreign: bool
    role: str
    group: str  # of prefill workers; "": it is in none
    cohort: str
    epoch: int
    weight_version: str
    in_flight: int
    decoding: int | None
    queued_s: float | None
    kv: float | None  # share of its KV pages that requests hold
    output_per_s: float


def shown(status: WorkerStatus, group: str) -> ShownWorker:
    """Returns what is shown of a worker in this ``group``."""
    record, report = status.record, status.report
    load = None if report is None else report.load
    return ShownWorker(
        id=status.id,
        state="" if report is None else "paused" if report.paused else report.state,
        serves=status.serves,
        reason=status.reason,
        breaker=status.breaker,
        foreign=status.foreign,
        role="" if record is None else record.role,
        group=group,
        cohort="" if record is None else record.cohort,
        epoch=0 if record is None else record.epoch,
        weight_version="" if report is None else report.identity.version,
        in_flight=status.in_flight,
        decoding=None if load is None else load.decode_rows,
        queued_s=None if load is None else round(load.queued_s, 4),
        kv=None if load is None or not load.num_pages else round(load.taken_pages / load.num_pages, 4),
        output_per_s=round(load.decode_rows / load.step_s, 2) if load is not None and load.step_s else 0.0,
    )


def note_changes(log: ControlLog, before: dict[str, ShownWorker], now: dict[str, ShownWorker]) -> None:
    """Log how the workers of ``now`` differ from those of ``before``, both by id."""
    for worker in before.keys() - now.keys():
        log.add("worker", f"{worker} has left")
    for worker, new in now.items():
        old = before.get(worker)
        if old is None:
            log.add("worker", f"{worker} has come")
        elif new.serves and not old.serves:
            log.add("worker", f"{worker} gets requests again")
        elif old.serves and not new.serves:
            log.add("worker", f"{worker} gets no requests: {new.reason}", failed=new.state != "paused")
        if old is None:
            continue
        if new.role != old.role and old.role:
            log.add("role", f"{worker}: from {old.role} to {new.role}")
        if new.weight_version != old.weight_version and old.weight_version and new.weight_version:
            log.add("weights", f"{worker} serves version {new.weight_version}")
        if new.group != old.group and old.group and new.group:
            log.add("worker", f"{worker} goes to the group of {new.group} prompts")


@dataclass(slots=True)
class RouterFeedSource:
    """A router. Its log has what changes while somebody looks."""

    router: Router
    log: ControlLog = field(default_factory=ControlLog)
    _started_at: int = field(default_factory=lambda: int(time.time()))
    _workers: dict[str, ShownWorker] = field(default_factory=dict)
    _control: dict[tuple[str, str], int] = field(default_factory=dict)  # operations, by route and end
    _first: Mean = field(default_factory=Mean)

    @property
    def is_over(self) -> bool:
        """Whether the router shuts down."""
        return self.router.is_draining

    def status(self) -> dict[str, Any]:
        """Who the router is, and its groups of prefill workers."""
        router = self.router
        laps = laps_status(router.membership, router.config.laps_alloc_threshold)
        return {
            "kind": "router",
            "version": __version__,
            "incarnation": router.membership.router_id,
            "started_at": self._started_at,
            "policy": router.config.policy,
            "draining": router.is_draining,
            # Without what changes all the time.
            "laps": {
                name: value
                for name, value in msgspec.to_builtins(laps).items()
                if name in ("enabled", "reason", "threshold", "short_group", "long_group", "moves")
            },
        }

    def sample(self, seconds: float) -> dict[str, Any]:
        """The sums of all workers; logs what has changed since the last sample, if there was one just now."""
        registry, now = self.router.registry, time.monotonic()
        groups = {entry.id: entry.view.group or "" for entry in registry if entry.view is not None}
        statuses = [worker_status(registry, entry, now) for entry in registry]
        workers = {each.id: shown(each, groups.get(each.id, "")) for each in statuses}
        control = registry.counters.control
        if seconds:
            note_changes(self.log, self._workers, workers)
            for (route, end), number in control.items():
                if number != self._control.get((route, end), 0):
                    text = f"{route}: {'all workers did it' if end == 'done' else 'not all workers did it'}"
                    self.log.add("control", text, failed=end != "done")
        self._workers, self._control = workers, dict(control)
        first = registry.counters.plus(registry.elsewhere.counters).tallies["first_token"]
        kv = [each.kv for each in workers.values() if each.kv is not None]
        return {
            "in_flight": registry.num_requests(),
            "decoding": sum(each.decoding or 0 for each in workers.values()),
            "output_per_s": round(sum(each.output_per_s for each in workers.values()), 2),
            "kv_taken": round(sum(kv) / len(kv), 4) if kv else 0.0,
            "kv_taken_most": max(kv, default=0.0),
            "queued_s": max((each.queued_s or 0.0 for each in workers.values()), default=0.0),
            "first_token_s": self._first.take(first),
            "paused": bool(workers) and all(each.state == "paused" for each in workers.values()),
        }

    def detail(self) -> dict[str, Any]:
        """Each worker, and the totals of requests."""
        registry = self.router.registry
        counters = registry.counters.plus(registry.elsewhere.counters)
        ends: Counter[str] = Counter()
        for (_, end), number in counters.requests.items():
            ends[end] += number
        names = ("retries", "resumes", "waits", "pairs", "local", "second_claims", "refused")
        totals = {name: getattr(counters, name) for name in names}
        failed = sum(number for end, number in ends.items() if end in FAILED)
        return {
            "workers": list(self._workers.values()),
            "totals": totals | {"answered": ends["answered"], "failed": failed},
        }
