"""The names that other engines give to metrics, for routers and dashboards that know only those.

A name is here only if the number means the same there. The labels are Segue's own, of which ``model_name``
and ``finished_reason`` are the same everywhere. A histogram has Segue's buckets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import Metric

PREFIX = "segue:"


@dataclass(frozen=True, slots=True)
class OtherNames:
    """The names of one metric at other engines, without their prefixes and a counter's ``_total``."""

    vllm: tuple[str, ...] = ()  # the present one first, then older ones
    sglang: tuple[str, ...] = ()

    def of(self, engine: str) -> tuple[str, ...]:
        """Returns the names at an engine; none for one that is not known here."""
        known: Mapping[str, tuple[str, ...]] = {"vllm": self.vllm, "sglang": self.sglang}
        return known.get(engine, ())


# vLLM's and SGLang's use of KV leaves out cached pages that no request holds.
OTHER_NAMES: Mapping[str, OtherNames] = {
    "num_requests_running": OtherNames(("num_requests_running",), ("num_running_reqs",)),
    "num_requests_waiting": OtherNames(("num_requests_waiting",), ("num_queue_reqs",)),
    "kv_cache_taken_perc": OtherNames(("kv_cache_usage_perc", "gpu_cache_usage_perc"), ("token_usage",)),
    "prompt_tokens": OtherNames(("prompt_tokens",), ("prompt_tokens",)),
    "generation_tokens": OtherNames(("generation_tokens",), ("generation_tokens",)),
    "prefix_cache_queries": OtherNames(("prefix_cache_queries",)),
    "prefix_cache_hits": OtherNames(("prefix_cache_hits",), ("cached_tokens",)),
    "num_preemptions": OtherNames(("num_preemptions",), ("num_retracted_requests",)),
    "request_success": OtherNames(("request_success",)),
    "time_to_first_token_seconds": OtherNames(
        ("time_to_first_token_seconds",), ("time_to_first_token_seconds",)
    ),
    "queue_time_seconds": OtherNames(("request_queue_time_seconds",), ("queue_time_seconds",)),
    "prefill_time_seconds": OtherNames(("request_prefill_time_seconds",)),
    "inter_token_latency_seconds": OtherNames(
        ("inter_token_latency_seconds", "time_per_output_token_seconds"),
        ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    ),
    "e2e_request_latency_seconds": OtherNames(
        ("e2e_request_latency_seconds",), ("e2e_request_latency_seconds",)
    ),
}


def named(metrics: Iterable[Metric], engines: Collection[str]) -> Iterator[Metric]:
    """Yields metrics under the names of ``engines``, as ``--metric-names`` has them."""
    for metric in metrics:
        if "segue" in engines:
            yield metric
        names = OTHER_NAMES.get(metric.name.removeprefix(PREFIX), OtherNames())
        for engine in engines:
            for name in names.of(engine):
                yield _renamed(metric, f"{engine}:{name}")


def _renamed(metric: Metric, name: str) -> Metric:
    """Returns a metric under another name."""
    other = Metric(name, metric.documentation, metric.type)
    other.samples = [
        sample._replace(name=name + sample.name.removeprefix(metric.name)) for sample in metric.samples
    ]
    return other
