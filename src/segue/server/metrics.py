"""``/metrics`` for Prometheus, from the frontend's counters at the time of the scrape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from segue.frontend.stats import Histogram
from segue.launch.runtime import Runtime
from segue.messages.control import PauseMode
from segue.messages.steps import EagerReason
from segue.messages.weight_update import WeightNotice
from segue.server.access import Access, Routes
from segue.server.service import Service, service_of

LABELS = ["model_name"]

routes = Routes(Access.METRICS, "Health")


class EngineCollector(Collector):
    """Collects every metric of one server, labelled with its model."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics; none while the engine starts."""
        if self._service.runtime is None:
            return
        label = self._service.runtime.name
        manager = self._service.manager
        stats, now = manager.stats, manager.stats.counters
        used, live = (
            n / manager.ready.limits.num_pages for n in (now.used_pages, now.used_pages - now.cached_pages)
        )
        for name, text, gauge in (
            ("num_requests_running", "Running requests.", now.num_running),
            ("num_requests_waiting", "Waiting requests.", now.num_waiting),
            ("kv_cache_usage_perc", "KV pages of live requests and the prefix cache; 1 is full.", used),
            ("kv_cache_live_perc", "KV pages of live requests alone, not shared; 1 is full.", live),
        ):
            yield _filled(GaugeMetricFamily(f"segue:{name}", text, labels=LABELS), label, gauge)
        for name, text, total in (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", now.prompt_tokens),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", now.cached_tokens),
            ("num_preemptions", "Requests retracted for want of KV pages.", now.num_preemptions),
            ("prompt_tokens", "Prompt tokens of requests that got a first token.", stats.prompt_tokens),
            ("generation_tokens", "Output tokens.", now.output_tokens),
            ("engine_steps", "Steps planned.", now.num_steps),
            ("graph_hit", "Steps that replayed a CUDA graph.", now.graph_hits),
            ("padded_tokens", "Tokens computed only to fill a CUDA graph.", now.padded_tokens),
            (
                "non_finite_logits",
                "Requests that ended because their logits were NaN or infinite.",
                now.non_finite_logits,
            ),
        ):
            yield _filled(CounterMetricFamily(f"segue:{name}", text, labels=LABELS), label, total)
        paused = GaugeMetricFamily(
            "segue:paused", "Whether generation is paused, by mode.", labels=[*LABELS, "mode"]
        )
        for mode in get_args(PauseMode):
            paused.add_metric([label, mode], now.paused == mode)
        yield paused
        yield from _vital_metrics(self._service.runtime, label)
        yield from _weight_metrics(manager.weights, label)
        eager = {reason: now.eager_steps.get(reason, 0) for reason in get_args(EagerReason)}
        for name, text, key, totals in (
            ("request_success", "Requests that ended, by reason.", "finished_reason", stats.finished),
            ("eager", "Steps that ran without a CUDA graph, by reason.", "reason", eager),
        ):
            by_reason = CounterMetricFamily(f"segue:{name}", text, labels=[*LABELS, key])
            for reason, count in totals.items():
                by_reason.add_metric([label, reason], count)
            yield by_reason
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Seconds from a request to its first token.", stats.first_token),
            ("inter_token_latency_seconds", "Seconds between tokens of a request.", stats.between_tokens),
            ("e2e_request_latency_seconds", "Seconds from a request to its end.", stats.request),
            ("step_time_seconds", "Seconds from a step's launch to its tokens on the host.", stats.step),
        ):
            yield _histogram(name, text, label, histogram)


def _vital_metrics(runtime: Runtime, label: str) -> Iterator[Metric]:
    """Yields whether the workers answer, and the age of their last heartbeat."""
    hung = GaugeMetricFamily("segue:engine_hung", "Whether the engine does not answer.", labels=LABELS)
    yield _filled(hung, label, runtime.is_hung)
    ages = GaugeMetricFamily(
        "segue:heartbeat_age_seconds",
        "Seconds since the last heartbeat of a worker.",
        labels=[*LABELS, "rank"],
    )
    for rank, age in enumerate(runtime.heartbeat_ages):
        ages.add_metric([label, str(rank)], age)
    yield ages


def _weight_metrics(weights: WeightNotice, label: str) -> Iterator[Metric]:
    """Yields totals of weight updates, and figures of the last update that took effect."""
    for name, text, total in (
        ("weight_updates", "Weight updates that took effect.", weights.num_committed),
        ("weight_update_failures", "Weight updates that failed.", weights.num_failed),
    ):
        yield _filled(CounterMetricFamily(f"segue:{name}", text, labels=LABELS), label, total)
    last = weights.last
    for name, text, value in (
        ("weight_update_bytes", "Bytes that a rank received in the last update.", last.get("num_bytes", 0)),
        (
            "weight_update_gb_per_second",
            "Receive rate of the last update, GB per second.",
            last.get("gb_per_s", 0.0),
        ),
        (
            "weight_staging_bytes",
            "Bytes of staging memory of the last update.",
            last.get("staging", {}).get("num_bytes", 0),
        ),
        ("weights_poisoned", "Whether a failed commit prevents generation.", weights.poisoned is not None),
    ):
        yield _filled(GaugeMetricFamily(f"segue:{name}", text, labels=LABELS), label, value)
    seconds = GaugeMetricFamily(
        "segue:weight_update_seconds", "Seconds of the last update, by phase.", labels=[*LABELS, "phase"]
    )
    for phase, value in last.get("timings", {}).items():
        seconds.add_metric([label, phase.removesuffix("_s")], value)
    yield seconds
    version = GaugeMetricFamily(
        "segue:weight_version_info", "The name of the served weights.", labels=[*LABELS, "version"]
    )
    version.add_metric([label, weights.version], 1)
    yield version


@routes.get("/metrics")
async def metrics(request: Request) -> Response:
    """Returns the metrics in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(service_of(request)))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def _filled(
    metric: GaugeMetricFamily | CounterMetricFamily, label: str, value: float
) -> GaugeMetricFamily | CounterMetricFamily:
    metric.add_metric([label], value)
    return metric


def _histogram(name: str, text: str, label: str, histogram: Histogram) -> Metric:
    metric = HistogramMetricFamily(f"segue:{name}", text, labels=LABELS)
    metric.add_metric([label], histogram.cumulative(), histogram.total)
    return metric
