"""Rates and percentiles of engines, from two looks at their metrics."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

PREFIX = "segue:"
ROUTER = "router_"  # how the names of a router's own metrics begin
SCRAPED = f"{ROUTER}worker_scraped"  # whether a router could read a worker's metrics
WORKER = "worker"  # the label by which a router tells its workers' metrics apart
TTFT, BETWEEN = "time_to_first_token_seconds", "inter_token_latency_seconds"
Buckets = Mapping[float, float]  # upper bound in seconds -> number of values that are not above it


@dataclass(slots=True)
class EngineSample:
    """The metrics of one engine at one time, by their names without the prefix."""

    values: dict[str, float] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)  # of metrics with one value per label: the label's
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """What one line of the view shows; None: not known."""

    state: str
    running: float | None = None
    waiting: float | None = None
    tokens_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    kv_use: float | None = None  # share of the pages, cached ones too
    ttft_s: tuple[float | None, float | None] = (None, None)  # median, 99th percentile
    between_s: tuple[float | None, float | None] = (None, None)
    weights: str = ""


def samples_of(text: str) -> dict[str, EngineSample]:
    """Return the engines' metrics in Prometheus' text, by the worker's name; "" without a router.

    Raises:
        ValueError: the text is none.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, EngineSample] = {}
    for family in text_string_to_metric_families(text):
        name = family.name.removeprefix(PREFIX)
        if name == SCRAPED:  # also of workers that have not answered
            for sample in family.samples:
                found.setdefault(sample.labels[WORKER], EngineSample())
        if name == family.name or name.startswith(ROUTER):
            continue
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "model_name"}
            own = found.setdefault(labels.pop(WORKER, ""), EngineSample())
            if sample.name.endswith("_bucket") and set(labels) == {"le"}:
                own.buckets.setdefault(name, {})[float(labels["le"])] = sample.value
            elif not labels:
                own.values[name] = sample.value
            elif len(labels) == 1 and family.type == "gauge" and sample.value == 1:
                own.states[name] = next(iter(labels.values()))
    return found


class Meter:
    """Looks at engines now and then, and compares with a look some seconds ago."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._looks: dict[str, deque[tuple[float, EngineSample]]] = {}

    def add(self, now: float, samples: Mapping[str, EngineSample]) -> dict[str, EngineReading]:
        """Take the metrics at a time in seconds, and return what they say of each engine.

        An engine that has started anew begins with its own first look.
        """
        return {name: self._reading(name, now, sample) for name, sample in samples.items()}

    def forget(self) -> None:
        """Begin anew."""
        self._looks.clear()

    def _reading(self, name: str, now: float, sample: EngineSample) -> EngineReading:
        looks = self._looks.setdefault(name, deque())
        if looks and sample.values.get("engine_steps", 0) < looks[-1][1].values.get("engine_steps", 0):
            looks.clear()
        looks.append((now, sample))
        while len(looks) > 2 and now - looks[1][0] >= self._window_s:
            looks.popleft()
        then, before = looks[0]

        def rate(counter: str) -> float | None:
            if counter not in sample.values or now <= then:
                return None
            return (sample.values[counter] - before.values.get(counter, 0)) / (now - then)

        # Without a value since then, of all values.
        spans = {
            each: _difference(sample.buckets.get(each, {}), before.buckets.get(each, {}))
            for each in (TTFT, BETWEEN)
        }
        ttft, between = ((quantile(span, 0.5), quantile(span, 0.99)) for span in spans.values())
        return EngineReading(
            state=state_of(sample),
            running=sample.values.get("num_requests_running"),
            waiting=sample.values.get("num_requests_waiting"),
            tokens_per_s=rate("generation_tokens"),
            prompt_tokens_per_s=rate("prompt_tokens"),
            kv_use=sample.values.get("kv_cache_usage_perc"),
            ttft_s=ttft,
            between_s=between,
            weights=sample.states.get("weight_version_info", ""),
        )


def state_of(sample: EngineSample) -> str:
    """Return an engine's state in words: what keeps it from generating, if something does."""
    if sample.values.get("engine_hung"):
        return "hung"
    if sample.values.get("weights_poisoned"):
        return "poisoned"
    if mode := sample.states.get("paused"):
        return f"paused ({mode})"
    return sample.states.get("engine_state", "no answer")


def quantile(buckets: Buckets, share: float) -> float | None:
    """Return the value below which this share of the values is, by a straight line within a bucket.

    None without values. Values above the last bound count as that bound.
    """
    bounds = sorted(buckets)
    if not bounds or not buckets[bounds[-1]]:
        return None
    wanted, low, below = share * buckets[bounds[-1]], 0.0, 0.0
    for bound in bounds:
        count = buckets[bound]
        if count >= wanted and count > below:
            return low if math.isinf(bound) else low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return low


def total_of(readings: Iterable[EngineReading], names: Sequence[str]) -> dict[str, float]:
    """Return the sums of some fields over engines; those that are not known count as 0."""
    known = list(readings)
    return {name: sum(getattr(each, name) or 0 for each in known) for name in names}


def _difference(now: Buckets, before: Buckets) -> Buckets:
    """Return the buckets of the values since then; of all values if there is none since then."""
    span = {bound: count - before.get(bound, 0) for bound, count in now.items()}
    return span if any(span.values()) else now
