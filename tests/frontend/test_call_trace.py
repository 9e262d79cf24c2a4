"""The spans of an engine's calls and weight updates, as a collector sees them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from tests.server.leg_fleet import MODEL
from tests.server.live import LiveServer
from tests.support.collector import Collector, only

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
PROMPT = {"model": MODEL, "prompt": "Hello", "max_tokens": 3, "ignore_eos": True}
GROUP = {
    "master_address": "localhost",
    "master_port": "29600",
    "rank_offset": 1,
    "world_size": 2,
    "group_name": "g",
    "backend": "gloo",
}


@pytest.fixture(scope="module")
def collector(tiny_model: Path) -> Collector:
    """A collector to which a server has sent the spans of all that the tests look at."""
    with Collector() as collector, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_SERVICE_NAME", "mine")
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=other,zone=a")
        patch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=one")
        with LiveServer(tiny_model, otlp_traces_endpoint=collector.url) as server:
            http = server.client
            for body in (PROMPT, PROMPT | {"max_tokens": 1, "stream": True}):
                assert http.post("/v1/completions", json=body, headers=HEADERS).status_code == 200
            many = PROMPT | {"prompt": ["Hello", "You"], "n": 2}
            assert http.post("/v1/completions", json=many).status_code == 200
            assert http.post("/generate", json={"text": "a", "sampling_params": {"n": -1}}).status_code == 400
            http.post("/pause_generation", json={"mode": "in_place"})
            with ThreadPoolExecutor() as threads:
                waiting = threads.submit(http.post, "/generate", json={"text": "Hello", "rid": "held"})
                collector.wait(lambda: server.runtime.manager.stats.counters.num_waiting == 1)
                http.post("/abort_request", json={"rid": "held"})
                assert waiting.result(20).json()["meta_info"]["finish_reason"]["type"] == "abort"
            http.post("/continue_generation", json={})
            body = {"model_path": "/anywhere", "weight_version": "seven"}
            assert http.post("/update_weights_from_disk", json=body, headers=HEADERS).status_code == 200
            http.post("/init_weights_update_group", json=GROUP)
            bucket = {"names": ["a"], "dtypes": ["float32"], "shapes": [[2]]}
            body = {"num_buckets": 1, "buckets": [bucket], "group_name": "g"}
            assert http.post("/prepare_weights_update", json=body).json()["status"] == "ready"
            http.post("/abort_weights_update", json={})
            server.assert_nothing_left()
        return collector  # the end of the server has sent what was left


def test_a_call_has_a_span_with_children_for_its_phases(collector: Collector) -> None:
    calls = [span for span in collector.named(f"text_completion {MODEL}", "mine") if span.parent == SPAN]
    assert len(calls) == 2 and {call.trace_id for call in calls} == {TRACE}
    names = ["receive", "queue", "prefill", "decode"]
    for call, expected in zip(calls, (names, names[:3]), strict=True):  # one token needs no decoding
        inner = sorted((s for s in collector.spans if s.parent == call.span_id), key=lambda s: s.start)
        assert [span.name for span in inner] == expected
        for before, after in pairwise(inner):
            assert before.end == after.start
        assert inner[0].start == call.start and abs(inner[-1].end - call.end) < 1e9
    about = calls[0].attributes
    assert about["url.path"] == "/v1/completions" and about["gen_ai.usage.output_tokens"] == 3
    assert about["gen_ai.response.id"].startswith("cmpl-")
    assert "error.type" not in about and calls[0].error == ""
    assert collector.headers[0]["x-tenant"] == "one"


def test_a_call_of_several_requests_is_one_span(collector: Collector) -> None:
    (call,) = [s for s in collector.spans if s.attributes.get("gen_ai.request.choice.count") == 4]
    inner = sorted(span.name for span in collector.spans if span.parent == call.span_id)
    assert inner == sorted(["receive", *(["queue", "prefill", "decode"] * 4)])
    assert call.attributes["gen_ai.response.finish_reasons"] == ["length"] * 4
    assert call.attributes["gen_ai.usage.output_tokens"] == 12 and call.parent == ""


def test_a_call_that_fails_or_is_aborted_says_so(collector: Collector) -> None:
    refused = only([span for span in collector.spans if span.attributes.get("error.type")])
    # No text of a request is in a span, and an error may quote it.
    assert refused.attributes["error.type"] == refused.error == "InvalidRequestError"
    held = only([span for span in collector.spans if span.attributes.get("gen_ai.response.id") == "held"])
    assert held.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    inner = {span.name: span for span in collector.spans if span.parent == held.span_id}
    assert inner.keys() == {"receive", "queue"} and inner["queue"].end == held.end


def test_a_weight_update_has_a_span_with_children_for_its_phases(collector: Collector) -> None:
    done, failed = collector.named("weight update", "mine")
    assert (done.trace_id, done.parent, done.error) == (TRACE, SPAN, "")
    assert done.attributes["segue.weights.version"] == "seven"
    inner = sorted((s for s in collector.spans if s.parent == done.span_id), key=lambda span: span.start)
    assert [span.name for span in inner][-2:] == ["hold generation", "write"]
    assert all(one.end == two.start for one, two in pairwise(inner))
    assert (inner[0].start, inner[-1].end) == (done.start, done.end)
    assert failed.trace_id != TRACE and failed.parent == "" and failed.error
    assert "write" not in [span.name for span in collector.spans if span.parent == failed.span_id]
