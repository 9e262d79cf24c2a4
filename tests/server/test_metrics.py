from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from segue.disagg.lease import LeaseState
from segue.messages.control import Counters, HandoverCounters
from segue.server.metrics import _handover_metrics, _metric, _warm_metrics
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
    assert values["queue_time_seconds_count"] == values["prefill_time_seconds_count"] == 3
    parts = values["queue_time_seconds_sum"] + values["prefill_time_seconds_sum"]
    assert 0 < values["prefill_time_seconds_sum"] < parts <= values["time_to_first_token_seconds_sum"]
    assert values["step_time_seconds_count"] > 0
    assert values["eager_total:disabled"] == values["step_time_seconds_count"]  # a CPU has no graphs
    assert values["graph_hit_total:decode"] == values["graph_hit_total:forward"] == 0
    assert values["kernel_compilations_after_ready_total:0"] == 0
    assert values["kernel_loads_after_ready_total:0"] == 0
    assert values["eager_total:prompts"] == values["padded_tokens_total"] == 0
    assert values["step_time_seconds_bucket:+Inf"] == values["step_time_seconds_count"]
    assert values["num_requests_running"] == values["num_requests_waiting"] == 0
    assert values["num_preemptions_total"] == 0
    assert 0 < values["kv_cache_usage_perc"] <= 1
    assert values["kv_cache_live_perc"] == 0


def test_the_documented_bounds_are_those_of_the_histograms(server: LiveServer) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "monitoring.md").read_text()
    rows = dict(re.findall(r"^\| ([a-z -]+(?:, [a-z ]+)*) \| ([\d., ]+) \|$", text, re.MULTILINE))
    documented = {name: bounds for names, bounds in rows.items() for name in names.split(", ")}
    own = {
        "time to first token": "time_to_first_token",
        "inter-token latency": "inter_token_latency",
        "queue time": "queue_time",
        "prefill time": "prefill_time",
        "end to end": "e2e_request_latency",
        "step time": "step_time",
    }
    shown = server.client.get("/metrics").text
    for name, metric in own.items():
        found = re.findall(rf'^segue:{metric}_seconds_bucket{{le="([\d.e-]+)"', shown, re.MULTILINE)
        assert [float(each) for each in documented[name].split(", ")] == [float(each) for each in found] != []


def test_metrics_of_length_aware_prefill(tiny_model: Path) -> None:
    # However slow the first steps were, the long prompt is computed in one step.
    options = {"enable_laps_scheduler": True, "laps_length_threshold": 20, "laps_max_blocking_ms": 9_000.0}
    with LiveServer(tiny_model, **options) as server:
        api = Api(server.client)
        for tokens in (5, 10, 300):
            api.complete([70] * tokens, max_tokens=2)
        server.assert_nothing_left()
        values = scrape(server)
    assert values["laps_time_to_first_token_seconds_count:short"] == 2
    assert values["laps_time_to_first_token_seconds_count:long"] == 1
    assert values["laps_requests_waiting:short"] == values["laps_requests_waiting:long"] == 0
    assert values["laps_picks_total:short"] == 2 and values["laps_picks_total:long"] == 1
    assert values["laps_chunks_total"] == 1 and 280 < values["laps_chunk_tokens_total"] <= 300
    assert values["laps_window_seconds_total"] == 0
    assert values["laps_cost_error:0.5"] >= 0


def test_metrics_of_length_aware_prefill_are_left_out_without_it(server: LiveServer) -> None:
    assert not [name for name in scrape(server) if name.startswith("laps")]


def test_each_application_has_its_own_metrics(tiny_model: Path, server: LiveServer) -> None:
    Api(server.client).complete("abc")
    with LiveServer(tiny_model) as other:
        assert scrape(other)["generation_tokens_total"] == 0


def test_metrics_of_handing_kv_over(tiny_model: Path) -> None:
    with LiveServer(tiny_model, role="prefill") as server:
        where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 7}
        Api(server.client).complete("abc", **where)
        server.assert_nothing_left()
        values = scrape(server)
        (state,) = server.client.get("/server_info").json()["internal_states"]
    assert values["pd_offers:open"] == 1 and values["pd_offers:claimed"] == values["pd_offers:sending"] == 0
    assert {name for name in values if name.startswith("pd_leases")} == {
        f"pd_leases:{each.name.lower()}" for each in LeaseState if each is not LeaseState.ENDED
    }
    for name in ("handed_over", "adopted", "recomputed_total:expired", "failed_total:transport"):
        assert values[f"pd_{name}" if ":" in name else f"pd_{name}_total"] == 0
    assert values["pd_transferred_bytes_total"] == values["pd_adoption_seconds_total"] == 0
    assert values["request_success_total:handoff"] == 1
    assert state["disagg_prefill_bootstrap_queue_size"] == 1


def test_metrics_of_handing_kv_over_count_what_the_scheduler_counts() -> None:
    handover = HandoverCounters(
        offers={"sending": 2},
        leases={"granted": 3},
        num_sent=4,
        num_adopted=5,
        recomputed={"version": 6},
        failed={"link": 7},
        num_pages=8,
        adopt_s=0.5,
    )
    gauge, counter = (partial(_metric, kind, MODEL) for kind in (GaugeMetricFamily, CounterMetricFamily))
    samples = [s for metric in _handover_metrics(handover, 100, gauge, counter) for s in metric.samples]
    values = {":".join([s.name, *list(s.labels.values())[1:]]): s.value for s in samples if s.value}
    assert values == {
        "segue:pd_offers:sending": 2,
        "segue:pd_leases:granted": 3,
        "segue:pd_handed_over_total": 4,
        "segue:pd_adopted_total": 5,
        "segue:pd_recomputed_total:version": 6,
        "segue:pd_failed_total:link": 7,
        "segue:pd_transferred_bytes_total": 800,
        "segue:pd_adoption_seconds_total": 0.5,
    }


def test_metrics_of_warm_kv_say_what_was_taken_over_or_why_nothing_was() -> None:
    gauge = partial(_metric, GaugeMetricFamily, MODEL)

    def shown(counters: Counters) -> dict[str, float]:
        samples = [s for metric in _warm_metrics(counters, 16, gauge) for s in metric.samples]
        return {":".join([s.name, *list(s.labels.values())[1:]]): s.value for s in samples if s.value}

    assert shown(Counters(warm_pages=3)) == {"segue:warm_kv_pages": 3, "segue:warm_kv_tokens": 48}
    assert shown(Counters(warm_refused="fresh")) == {"segue:warm_kv_refused:fresh": 1}


def test_an_engine_without_warm_kv_has_no_metrics_of_it(server: LiveServer) -> None:
    assert not [name for name in scrape(server) if name.startswith("warm_")]


def test_an_engine_that_hands_no_kv_over_has_no_metrics_of_it(server: LiveServer) -> None:
    assert not [name for name in scrape(server) if name.startswith("pd_")]
    (state,) = server.client.get("/server_info").json()["internal_states"]
    queues = [value for name, value in state.items() if name.startswith("disagg_")]
    assert queues == [0, 0, 0, 0] and state["handover"] is None
