from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import MODEL, Api
from tests.server.live import LiveServer


def scrape(server: LiveServer) -> dict[str, float]:
    response = server.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            assert sample.labels["model_name"] == MODEL
            rest = [value for name, value in sorted(sample.labels.items()) if name != "model_name"]
            values[":".join([sample.name.removeprefix("segue:"), *rest])] = sample.value
    return values


def test_counters_and_histograms_match_the_served_requests(tiny_model: Path) -> None:
    with LiveServer(tiny_model) as server:
        api = Api(server.client)
        api.complete([70] * 40, max_tokens=5)
        api.complete([70] * 40, max_tokens=5)
        api.complete("abc<|im_end|>")
        server.assert_nothing_left()
        values = scrape(server)
    assert values["prompt_tokens_total"] == 84
    assert values["generation_tokens_total"] == 14
    assert values["prefix_cache_queries_total"] == 84
    assert values["prefix_cache_hits_total"] == 32
    assert values["request_success_total:length"] == 2
    assert values["request_success_total:stop"] == 1
    assert values["time_to_first_token_seconds_count"] == 3
    assert values["e2e_request_latency_seconds_sum"] >= values["time_to_first_token_seconds_sum"] > 0
    assert values["inter_token_latency_seconds_count"] == 4 + 4 + 3
    assert values["e2e_request_latency_seconds_count"] == 3
    assert values["step_time_seconds_count"] > 0
    assert values["eager_total:disabled"] == values["step_time_seconds_count"]  # a CPU has no graphs
    assert values["eager_total:prompts"] == values["graph_hit_total"] == values["padded_tokens_total"] == 0
    assert values["step_time_seconds_bucket:+Inf"] == values["step_time_seconds_count"]
    assert values["num_requests_running"] == values["num_requests_waiting"] == 0
    assert values["num_preemptions_total"] == 0
    assert 0 < values["kv_cache_usage_perc"] <= 1
    assert values["kv_cache_live_perc"] == 0


def test_each_application_has_its_own_metrics(tiny_model: Path, server: LiveServer) -> None:
    Api(server.client).complete("abc")
    with LiveServer(tiny_model) as other:
        assert scrape(other)["generation_tokens_total"] == 0
