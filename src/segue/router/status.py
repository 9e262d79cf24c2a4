"""What a router shows of its workers: ``/workers``, ``/laps_status``, ``/health`` and ``/metrics``."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from segue.laps.group_status import GroupMember, LapsOff, LapsStatus, status
from segue.messages.fleet import WorkerRecord, WorkerReport
from segue.router.entry import BOUNDS, WorkerEntry
from segue.router.membership import Membership
from segue.router.registry import Registry

HISTOGRAMS = (  # their names in `BOUNDS` and in Prometheus, and what they are
    ("queue", "queue_time", "Seconds until a worker was chosen for a request."),
    ("first_token", "time_to_first_token", "Seconds from a request for a stream to its first token."),
    ("request", "e2e_request_latency", "Seconds from a request to the end of its reply."),
)


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker in the answer of ``/workers``."""

    id: str
    url: str
    serves: bool  # whether it gets new requests
    reason: str  # why it gets none; ""
    takes_weights: bool  # whether new weights are for it: it is not leaving, and not replaced by a newer one
    foreign: bool  # whether it is no engine of Segue, so that its health is all that is known of it
    in_flight: int  # requests of this router
    breaker: str  # state of its circuit breaker
    record: WorkerRecord | None  # None: the router has not reached it
    report: WorkerReport | None  # None: there was none yet, or it is a foreign worker


def worker_status(registry: Registry, entry: WorkerEntry, now: float) -> WorkerStatus:
    """Returns what ``/workers`` shows of a worker."""
    reason, view = entry.why_not(now), entry.view
    return WorkerStatus(
        id=entry.id,
        url=entry.url,
        serves=reason is None,
        reason=reason or "",
        takes_weights=not entry.is_leaving and not entry.is_replaced,
        foreign=view is not None and view.is_foreign,
        in_flight=registry.num_requests(entry.id),
        breaker=_breaker(entry),
        record=None if view is None or view.is_foreign else view.record,
        report=None if view is None or view.is_foreign else view.report,
    )


def laps_status(membership: Membership, threshold: int) -> LapsStatus | LapsOff:
    """Returns what ``/laps_status`` shows."""
    registry, now = membership.registry, time.monotonic()
    if membership.rebalance_rules is None:
        return LapsOff(reason=membership.groups.off)
    members = {
        entry.id: GroupMember(
            url=entry.url,
            role=entry.view.record.role,
            in_flight=registry.num_requests(entry.id),
            queued_s=entry.view.queued_s(now),
            breaker=_breaker(entry),
        )
        for entry in registry
        if entry.view is not None and entry.prefills
    }
    return status(
        membership.groups,
        membership.rebalance_rules,
        threshold=threshold,
        workers=members,
        pending=registry.pending(),
        now=now,
        unix_now=time.time(),
    )


class RouterCollector(Collector):
    """Collects the metrics of a router."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics, by worker where they differ."""
        registry, now = self._registry, time.monotonic()
        counters = registry.counters.plus(registry.elsewhere.counters)
        serves = GaugeMetricFamily(
            "segue:router_worker_serves", "Whether a worker gets requests.", labels=["worker"]
        )
        flying = GaugeMetricFamily("segue:router_in_flight", "Requests in flight.", labels=["worker"])
        for entry in registry:
            serves.add_metric([entry.id], float(entry.why_not(now) is None))
            flying.add_metric([entry.id], registry.num_requests(entry.id))
        ended = CounterMetricFamily(
            "segue:router_requests", "Requests that ended, by end.", labels=["worker", "end"]
        )
        for (worker, end), number in counters.requests.items():
            ended.add_metric([worker, end], number)
        control = CounterMetricFamily(
            "segue:router_control_requests", "Operations sent to all workers.", labels=["route", "end"]
        )
        for (route, end_), number in counters.control.items():
            control.add_metric([route, end_], number)
        yield from (serves, flying, ended, control)
        for name, text, number in (
            ("retries", "Attempts at another worker before the client had anything.", counters.retries),
            ("resumes", "Attempts at another worker after the client had a part.", counters.resumes),
            ("waits", "Requests that waited for a worker to take another one's place.", counters.waits),
            ("second_claims", "Those at a decode worker that took over KV.", counters.second_claims),
            ("pairs", "Attempts at a prefill and a decode worker.", counters.pairs),
            ("local", "Attempts at a decode worker alone.", counters.local),
            ("refused", "Requests that no worker could take.", counters.refused),
        ):
            yield CounterMetricFamily(f"segue:router_{name}", text, number)
        for name, metric, text in HISTOGRAMS:
            tally = counters.tallies[name]
            family = HistogramMetricFamily(f"segue:router_{metric}_seconds", text)
            family.add_metric([], tally.cumulative(BOUNDS[name]), tally.total)
            yield family


def _breaker(entry: WorkerEntry) -> str:
    return "closed" if entry.view is None else entry.view.breaker.state.name.lower()
