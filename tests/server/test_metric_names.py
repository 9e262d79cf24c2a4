"""Metrics under the names of other engines."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from segue.config import EngineConfig
from segue.errors import ConfigError
from segue.frontend.stats import Histogram
from segue.server.metric_names import OTHER_NAMES, named
from segue.server.metrics import _engine_metrics, _histogram
from tests.server.live import LiveServer


class Found:
    """A collector of metrics that were made before."""

    def __init__(self, metrics: list[Metric]) -> None:
        self.metrics = metrics

    def collect(self) -> list[Metric]:
        return self.metrics

    def samples(self) -> dict[str, float]:
        """The samples of the exposition, by name and the values of labels, whose names are sorted."""
        families = text_string_to_metric_families(generate_latest(self).decode())  # type: ignore[arg-type]
        found = [sample for family in families for sample in family.samples]
        return {":".join([s.name, *(s.labels[name] for name in sorted(s.labels))]): s.value for s in found}


def example() -> list[Metric]:
    waiting = GaugeMetricFamily("segue:num_requests_waiting", "Waiting.", labels=["model_name"])
    waiting.add_metric(["m"], 3)
    tokens = CounterMetricFamily("segue:prefix_cache_hits", "Found.", labels=["model_name"])
    tokens.add_metric(["m"], 4)
    own = GaugeMetricFamily("segue:epoch", "Epoch.", labels=["model_name"])
    own.add_metric(["m"], 5)
    first = Histogram((1000.0,))
    first.observe(0.5)
    return [waiting, tokens, own, _histogram("m", "inter_token_latency_seconds", "Between.", first)]


def test_metrics_have_the_names_of_the_engines_that_are_asked_for() -> None:
    samples = Found(list(named(example(), ["vllm", "sglang"]))).samples()
    assert not [name for name in samples if name.startswith("segue")]
    assert samples["vllm:num_requests_waiting:m"] == samples["sglang:num_queue_reqs:m"] == 3
    assert samples["vllm:prefix_cache_hits_total:m"] == samples["sglang:cached_tokens_total:m"] == 4
    for name in ("inter_token_latency_seconds", "time_per_output_token_seconds"):
        assert samples[f"vllm:{name}_bucket:1.0:m"] == samples[f"sglang:{name}_count:m"] == 1
        assert samples[f"vllm:{name}_sum:m"] == 0.5
    assert not [name for name in samples if "epoch" in name]


def test_segues_own_names_stay_as_they_are() -> None:
    assert list(named(made := example(), ["segue"])) == made


def test_each_metric_that_has_other_names_is_one_of_an_engine(server: LiveServer) -> None:
    metrics = list(_engine_metrics(server.runtime))
    assert OTHER_NAMES.keys() <= {metric.name.removeprefix("segue:") for metric in metrics}
    both = Found(list(named(metrics, ["segue", "vllm"]))).samples()
    assert both["vllm:kv_cache_usage_perc:tiny-model"] == both["segue:kv_cache_taken_perc:tiny-model"]
    assert "vllm:request_success_total:length:tiny-model" in both


READ_BY_OTHERS = {
    # What routers for Kubernetes read of an endpoint by default.
    *("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"),
    *("sglang:num_queue_reqs", "sglang:num_running_reqs", "sglang:token_usage"),
    # What a trainer's own monitor reads besides.
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total"),
    *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total"),
    *("vllm:time_to_first_token_seconds_sum", "vllm:inter_token_latency_seconds_count"),
    *("vllm:e2e_request_latency_seconds_sum", "sglang:num_retracted_requests_total"),
}


def test_those_who_know_other_engines_find_what_they_read(server: LiveServer) -> None:
    samples = Found(list(named(_engine_metrics(server.runtime), ["vllm", "sglang"]))).samples()
    assert {":".join(name.split(":")[:2]) for name in samples} >= READ_BY_OTHERS


@pytest.mark.parametrize("names", ["vllm,vllm", "tgi", "segue,,vllm", "VLLM"])
def test_other_names_than_those_are_refused(names: str) -> None:
    with pytest.raises(ConfigError, match=r"^metric_names="):
        EngineConfig(metric_names=names)


def test_times_of_phases_have_the_names_of_the_engines_that_have_them() -> None:
    times = Histogram((1000.0,))
    made = [_histogram("m", f"{phase}_time_seconds", "Time.", times) for phase in ("queue", "prefill")]
    names = {metric.name for metric in named(made, ["vllm", "sglang"])}
    assert names == {
        "vllm:request_queue_time_seconds",
        "vllm:request_prefill_time_seconds",
        "sglang:queue_time_seconds",
    }
