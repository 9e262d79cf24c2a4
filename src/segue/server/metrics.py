"""``/metrics`` for Prometheus, from the frontend's counters at the time of the scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import get_args

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from segue.api.schema import text_schema
from segue.config import EngineConfig, parse_metric_names
from segue.disagg.lease import LeaseState
from segue.disagg.offer import OfferState
from segue.failover.life import Life, LifeState
from segue.frontend.stats import Histogram, Stats
from segue.launch.runtime import Runtime
from segue.messages.control import Counters, HandoverCounters, LapsCounters, PauseMode
from segue.messages.kv import GoneReason
from segue.messages.life import ColdReason
from segue.messages.steps import EagerReason
from segue.server.access import Access, Routes
from segue.server.metric_names import named

LABEL = "model_name"
GRAPH_KINDS = ("decode", "guided", "forward", "prefill", "grid")
OFFER_STATES = tuple(each.name.lower() for each in OfferState if each is not OfferState.ENDED)
LEASE_STATES = tuple(each.name.lower() for each in LeaseState if each is not LeaseState.ENDED)
_Make = Callable[..., Metric]

routes = Routes(Access.METRICS, "Health")


@routes.get("/metrics", schema=text_schema("text/plain"))
async def metrics(request: Request) -> Response:
    """Returns the metrics in Prometheus' text format."""
    runtime: Runtime | None = request.app.state.runtime
    return _exposition(EngineCollector(runtime))


def metrics_of(runtime: Runtime | None, life: Life, config: EngineConfig) -> Response:
    """Returns the metrics of an engine in any state; its options name the model until it is loaded."""
    return _exposition(LifeCollector(life, config) if runtime is None else EngineCollector(runtime))


def _exposition(collector: Collector) -> Response:
    return Response(generate_latest(collector), media_type=CONTENT_TYPE_LATEST)


def _names(config: EngineConfig) -> list[str]:
    return parse_metric_names(config.metric_names, "metric_names")


class LifeCollector(Collector):
    """Collects the metrics of an engine that starts."""

    def __init__(self, life: Life, config: EngineConfig) -> None:
        self._life = life
        self._config = config

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics."""
        name = next(iter(self._config.served_model_names), self._config.model or "")
        gauge = partial(_metric, GaugeMetricFamily, name)
        counter = partial(_metric, CounterMetricFamily, name)
        yield from named(_life_metrics(self._life, 0, gauge, counter), _names(self._config))


class EngineCollector(Collector):
    """Collects every metric of one server, labelled with its model."""

    def __init__(self, runtime: Runtime | None) -> None:
        self._runtime = runtime

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics under the names that the options want; none while the engine starts."""
        if self._runtime is not None:
            yield from named(_engine_metrics(self._runtime), _names(self._runtime.config))


def _engine_metrics(runtime: Runtime) -> Iterator[Metric]:
    """Yields the metrics of an engine.

    The helpers below know the model's name: each call takes a metric's name, its help text, its value or
    its values by label, and the label. ``now`` has the scheduler's counters, ``stats`` the frontend's
    own, and ``last`` what is known of the last weight update.
    """
    gauge = partial(_metric, GaugeMetricFamily, runtime.name)
    counter = partial(_metric, CounterMetricFamily, runtime.name)
    histogram = partial(_histogram, runtime.name)
    manager, stats, now = runtime.manager, runtime.manager.stats, runtime.manager.stats.counters
    pages = manager.ready.limits.num_pages
    live = (now.used_pages - now.cached_pages) / pages
    yield from _life_metrics(runtime.life, runtime.epoch, gauge, counter)
    yield gauge("num_requests_running", "Running requests.", now.num_running)
    yield gauge("num_requests_waiting", "Waiting requests.", now.num_waiting)
    text = "KV pages of live requests and the prefix cache; 1 is full."
    yield gauge("kv_cache_usage_perc", text, now.used_pages / pages)
    yield gauge("kv_cache_live_perc", "KV pages of live requests alone, not shared; 1 is full.", live)
    text = "KV pages that live requests hold, shared or not: no others can be evicted; 1 is full."
    yield gauge("kv_cache_taken_perc", text, now.taken_pages / pages)

    text = "Prompt tokens looked up in the prefix cache."
    yield counter("prefix_cache_queries", text, now.prompt_tokens)
    yield counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", now.cached_tokens)
    yield counter("num_preemptions", "Requests retracted for want of KV pages.", now.num_preemptions)
    text = "Prompt tokens of requests that got a first token."
    yield counter("prompt_tokens", text, stats.prompt_tokens)
    yield counter("generation_tokens", "Output tokens.", now.output_tokens)
    yield counter("engine_steps", "Steps planned.", now.num_steps)
    graphs = dict.fromkeys(GRAPH_KINDS, 0) | now.graph_hits
    yield counter("graph_hit", "Steps that replayed a CUDA graph, by kind.", graphs, "kind")
    yield counter("padded_tokens", "Tokens computed only to fill a CUDA graph.", now.padded_tokens)
    ranks = range(runtime.config.tp)
    compiled = {str(rank): now.compiled_kernels.get(rank, 0) for rank in ranks}
    text = "Kernels that were compiled while requests waited, by rank; the start should compile all."
    yield counter("kernel_compilations_after_ready", text, compiled, "rank")
    loaded = {str(rank): now.loaded_kernels.get(rank, 0) for rank in ranks}
    text = "Kernels that were loaded from the cache on disk while requests waited, by rank."
    yield counter("kernel_loads_after_ready", text, loaded, "rank")
    text = "Requests that ended because their logits were NaN or infinite."
    yield counter("non_finite_logits", text, now.non_finite_logits)

    paused = {mode: now.paused == mode for mode in get_args(PauseMode)}
    yield gauge("paused", "Whether generation is paused, by mode.", paused, "mode")
    yield gauge("engine_hung", "Whether the engine does not answer.", runtime.is_hung)
    ages = {str(rank): age for rank, age in enumerate(runtime.heartbeat_ages)}
    yield gauge("heartbeat_age_seconds", "Seconds since the last heartbeat of a worker.", ages, "rank")

    weights, last = manager.weights, manager.weights.last
    yield counter("weight_updates", "Weight updates that took effect.", weights.num_committed)
    yield counter("weight_update_failures", "Weight updates that failed.", weights.num_failed)
    text = "Bytes that a rank received in the last update."
    yield gauge("weight_update_bytes", text, last.get("num_bytes", 0))
    text = "Receive rate of the last update, GB per second."
    yield gauge("weight_update_gb_per_second", text, last.get("gb_per_s", 0.0))
    staging = last.get("staging", {}).get("num_bytes", 0)
    yield gauge("weight_staging_bytes", "Bytes of staging memory of the last update.", staging)
    poisoned = weights.poisoned is not None
    yield gauge("weights_poisoned", "Whether a failed commit prevents generation.", poisoned)
    phases = {phase.removesuffix("_s"): value for phase, value in last.get("timings", {}).items()}
    yield gauge("weight_update_seconds", "Seconds of the last update, by phase.", phases, "phase")
    yield gauge("weight_version_info", "The name of the served weights.", {weights.version: 1}, "version")

    finished = stats.finished
    yield counter("request_success", "Requests that ended, by reason.", finished, "finished_reason")
    eager = {reason: now.eager_steps.get(reason, 0) for reason in get_args(EagerReason)}
    yield counter("eager", "Steps that ran without a CUDA graph, by reason.", eager, "reason")

    text = "Seconds from a request to its first token."
    yield histogram("time_to_first_token_seconds", text, stats.first_token)
    text = "Seconds that a request has waited for its first step, once it has ended."
    yield histogram("queue_time_seconds", text, stats.queue)
    text = "Seconds from a request's first step to its first token, once it has ended."
    yield histogram("prefill_time_seconds", text, stats.prefill)
    text = "Seconds between tokens of a request."
    yield histogram("inter_token_latency_seconds", text, stats.between_tokens)
    yield histogram("e2e_request_latency_seconds", "Seconds from a request to its end.", stats.request)
    text = "Seconds from a step's launch to its tokens on the host."
    yield histogram("step_time_seconds", text, stats.step)
    if now.laps is not None:
        yield from _laps_metrics(now.laps, stats, gauge, counter, histogram)
    if runtime.config.warm_kv:
        yield from _warm_metrics(now, manager.ready.limits.page_size, gauge)
    if now.handover is not None:
        page_bytes = manager.ready.kv_bytes // (pages + 1)  # the pool has a scratch page
        yield from _handover_metrics(now.handover, page_bytes, gauge, counter)


def _life_metrics(life: Life, epoch: int, gauge: _Make, counter: _Make) -> Iterator[Metric]:
    """Yields the metrics of an engine's life."""
    states = {state.name.lower(): state is life.state for state in LifeState}
    yield gauge("engine_state", "Whether the engine is in a state.", states, "state")
    entered = {state.name.lower(): number for state, number in life.entered.items()}
    yield counter("engine_transitions", "How often a state was entered.", entered, "state")
    yield gauge("wake_seconds", "Seconds of the wake, by phase.", life.wake_phases, "phase")
    yield gauge("epoch", "The epoch under which the engine serves; 0: it is in no cohort, or asleep.", epoch)
    yield counter("failovers", "Wakes in the place of another engine.", life.num_failovers)


def _warm_metrics(now: Counters, page_size: int, gauge: _Make) -> Iterator[Metric]:
    """Yields the metrics of warm KV; an engine wakes once."""
    yield gauge("warm_kv_pages", "KV pages taken over from the engine before.", now.warm_pages)
    yield gauge("warm_kv_tokens", "Tokens of these pages.", now.warm_pages * page_size)
    refused = {reason: reason == now.warm_refused for reason in get_args(ColdReason)}
    yield gauge("warm_kv_refused", "Whether no KV was taken over, by reason.", refused, "reason")


def _laps_metrics(
    laps: LapsCounters, stats: Stats, gauge: _Make, counter: _Make, histogram: _Make
) -> Iterator[Metric]:
    """Yields the metrics of length-aware prefill scheduling."""
    yield gauge("laps_requests_waiting", "Waiting requests, by class.", laps.waiting, "class")
    yield counter("laps_picks", "Steps with prefill work, and waits, by reason.", laps.picks, "reason")
    yield counter("laps_chunks", "Steps with chunks of long prompts.", laps.chunks)
    yield counter("laps_chunk_tokens", "Tokens of chunks of long prompts.", laps.chunk_tokens)
    yield counter("laps_window_seconds", "Seconds that short prompts waited for others.", laps.window_s)
    errors = {"0.5": laps.error_p50, "0.9": laps.error_p90}
    text = "Relative error of the predicted time of steps, by quantile."
    yield gauge("laps_cost_error", text, errors, "quantile")
    text = "Seconds from a request to its first token, by class."
    yield histogram("laps_time_to_first_token_seconds", text, stats.first_token_of, "class")


def _handover_metrics(
    handover: HandoverCounters, page_bytes: int, gauge: _Make, counter: _Make
) -> Iterator[Metric]:
    """Yields the metrics of handing KV over; ``page_bytes`` is the size of a page of the KV cache."""
    offers, leases = dict.fromkeys(OFFER_STATES, 0), dict.fromkeys(LEASE_STATES, 0)
    yield gauge("pd_offers", "Prompts whose KV is offered, by state.", offers | handover.offers, "state")
    text = "Prompts whose KV is awaited, or whose pages may still be written to, by state."
    yield gauge("pd_leases", text, leases | handover.leases, "state")
    text = "Requests whose KV was handed over to another engine."
    yield counter("pd_handed_over", text, handover.num_sent)
    text = "Requests that go on with KV of another engine."
    yield counter("pd_adopted", text, handover.num_adopted)
    text = "Requests that computed their prompts themselves, by reason."
    recomputed = dict.fromkeys((*get_args(GoneReason), "version"), 0) | handover.recomputed
    yield counter("pd_recomputed", text, recomputed, "reason")
    text = "Requests that failed because their KV did not come, by reason."
    yield counter("pd_failed", text, dict.fromkeys(get_args(GoneReason), 0) | handover.failed, "reason")
    text = "Bytes of KV that were handed over, or taken over."
    yield counter("pd_transferred_bytes", text, handover.num_pages * page_bytes)
    text = "Seconds from the first tokens of adopted requests to their adoption, in sum."
    yield counter("pd_adoption_seconds", text, handover.adopt_s)


def _metric(
    family: type[GaugeMetricFamily] | type[CounterMetricFamily],
    model: str,
    name: str,
    text: str,
    value: float | Mapping[str, float],
    label: str | None = None,
) -> Metric:
    """Returns a metric of one value or, with ``label``, of one value per value of that label."""
    metric = family(f"segue:{name}", text, labels=[LABEL] if label is None else [LABEL, label])
    if isinstance(value, Mapping):
        for key, each in value.items():
            metric.add_metric([model, key], each)
    else:
        metric.add_metric([model], value)
    return metric


def _histogram(
    model: str,
    name: str,
    text: str,
    histograms: Histogram | Mapping[str, Histogram],
    label: str | None = None,
) -> Metric:
    """Returns a metric of a histogram's counts by upper bound, and of the sum of its values.

    With ``label`` there is one histogram per value of that label.
    """
    metric = HistogramMetricFamily(f"segue:{name}", text, labels=[LABEL] if label is None else [LABEL, label])
    by_value = histograms.items() if isinstance(histograms, Mapping) else [(None, histograms)]
    for value, each in by_value:
        metric.add_metric([model, *([] if value is None else [value])], each.cumulative(), each.total)
    return metric
