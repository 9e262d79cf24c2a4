"""A prefill and a decode engine that a router sends two legs give what one engine gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from segue.frontend.call_trace import EngineTracing
from segue.messages.leg import RETRYABLE, Data, End
from segue.tracing.opening import tracer_of
from tests.router.fake_servers import routed, run, until
from tests.server.leg_fleet import (
    CASES,
    CHAT,
    COMPLETION,
    MODEL,
    ROOMS,
    USAGE,
    Case,
    Fleet,
    check_each_cut,
    each_case,
    in_stream,
    in_whole,
    native,
    openai,
    tokens,
)
from tests.server.legs import frames, leg_of, named, payload, post, reading, stream, whole_body
from tests.support.collector import Collector, only
from tests.support.held_steps import hold_here


@each_case
def test_a_pair_streams_what_one_engine_does(fleet: Fleet, case: Case) -> None:
    path, body = in_stream(case)
    told = frames(fleet.two, leg_of(path, body))
    found = fleet.pair(path, body)
    assert stream(payload(found)) == stream(payload(told))
    assert tokens(named(found)) == tokens(named(told))


@each_case
def test_a_pair_replies_what_one_engine_does(fleet: Fleet, case: Case) -> None:
    path, body = in_whole(case)
    assert whole_body(fleet.pair(path, body)) == whole_body(frames(fleet.two, leg_of(path, body)))


@pytest.mark.parametrize("name", ["native, all logprobs", "completion, batch", "chat"])
def test_a_pair_goes_on_with_a_stream(fleet: Fleet, name: str) -> None:
    path, body = in_stream(CASES[name])
    told = frames(fleet.two, leg_of(path, body))
    before = told[: len(told) // 2]
    adopted = fleet.handover()["num_adopted"]
    after = fleet.pair(path, body, outputs=named(before))
    assert stream(payload(before) + payload(after)) == stream(payload(told))
    assert fleet.handover()["num_adopted"] > adopted


def test_another_decode_engine_goes_on_with_a_pair_s_stream(fleet: Fleet) -> None:
    path, body = in_stream(CASES["native"])
    told = fleet.pair(path, body)
    check_each_cut(told, lambda **more: leg_of(path, body, **more), fleet.two, stream)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_prompt_without_output_needs_no_decoding_either(fleet: Fleet, streamed: bool) -> None:
    case = native(return_logprob=True, logprob_start_len=0, sampling_params={"max_new_tokens": 0}, rid="mine")
    path, body = in_stream(case) if streamed else in_whole(case)
    told, found = frames(fleet.two, leg_of(path, body)), fleet.pair(path, body)
    look = (lambda data: stream(payload(data))) if streamed else whole_body
    assert look(found) == look(told) and b'"mine"' in payload(found)


def test_a_pair_scores_prompts_as_one_engine_does(fleet: Fleet) -> None:
    for path, body in (
        openai(COMPLETION, prompt_logprobs=2),
        openai(COMPLETION, echo=True, logprobs=1, max_tokens=0),
    ):
        assert whole_body(fleet.pair(path, body)) == whole_body(frames(fleet.two, leg_of(path, body)))


def test_one_token_needs_no_decoding(fleet: Fleet) -> None:
    path, body = in_stream(openai(CHAT, max_tokens=1, **USAGE))
    told = fleet.pair(path, body)
    assert stream(payload(told)) == stream(payload(frames(fleet.two, leg_of(path, body))))


def test_without_a_first_token_the_router_chooses_another_pair(fleet: Fleet) -> None:
    path, body = in_stream(CASES["chat"])
    before = fleet.handover()
    answer = post(fleet.one, leg_of(path, body, kind="decode", room=next(ROOMS), peer="127.0.0.1:1"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "kv_peer_lost")
    assert "kv_peer_lost" in RETRYABLE
    assert fleet.handover()["recomputed"] == before["recomputed"], "the prompt was not computed"


def test_the_first_token_does_not_wait_for_the_pages(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode engine has no pages to grant until the client has token 1."""
    many = {"max_new_tokens": 400, "ignore_eos": True}
    prompts = [f"{index} {'Hello world ' * 30}" for index in range(4)]
    path, filler = in_stream(("/generate", {"text": prompts, "sampling_params": many}))
    long = "How are you? " * 15
    path, body = in_stream(native(long))
    where = {"room": next(ROOMS), "peer": fleet.peer, "id": "leg-2"}
    told = frames(fleet.two, leg_of(path, body, id="leg-2"))
    gate = hold_here(tmp_path / "steps", monkeypatch)
    gate.close_after(100)  # the others cannot end before the pause
    with reading(fleet.one, leg_of("/generate", filler)) as filling:
        next(filling)
        fleet.one.client.post("/pause_generation", json={"mode": "in_place"})
        gate.open()
        first = fleet.threads.submit(frames, fleet.prefill, leg_of(path, body, kind="prefill", **where))
        with reading(fleet.one, leg_of(path, body, kind="decode", **where)) as decoding:
            found = [next(decoding)]
            assert isinstance(found[0], Data) and len(found[0].outputs[0].ids) == 4
            assert found[0].payload.startswith(b"data: ")
            assert fleet.handover()["leases"] == {"queued": 1}, "no page was granted"
            assert first.result(60) == [End(b"")]
            fleet.one.client.post("/continue_generation", json={})
            found += decoding
    assert stream(payload(found)) == stream(payload(told))


def test_a_client_s_own_pair_hands_each_choice_over(fleet: Fleet) -> None:
    path, body = native(params={"n": 3, "sampling_seed": 4, "max_new_tokens": 6})
    host, port = fleet.peer.rsplit(":", 1)
    where = {"bootstrap_host": host, "bootstrap_port": int(port), "bootstrap_room": next(ROOMS)}
    expected = fleet.two.client.post(path, json=body).json()
    before = fleet.handover()["num_adopted"]
    first = fleet.threads.submit(fleet.prefill.client.post, path, json=body | where)
    found = fleet.one.client.post(path, json=body | where).json()
    assert [each["output_ids"] for each in found] == [each["output_ids"] for each in expected]
    assert first.result(60).status_code == 200
    assert fleet.handover()["num_adopted"] == before + 3 and fleet.handover()["recomputed"] == {}


TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SERVER, CLIENT = 2, 3  # kinds of OTLP


def test_a_request_through_a_router_is_one_tree_of_spans(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body = openai(CHAT, max_tokens=5, temperature=0.5)
    engines = (fleet.prefill, fleet.one)
    with Collector() as collector:
        for server in engines:
            tracer = tracer_of(collector.url, "segue", server.url)
            assert tracer is not None
            tracing = EngineTracing(tracer, MODEL)
            monkeypatch.setattr(server.runtime, "tracing", tracing)
            monkeypatch.setattr(server.runtime.manager, "tracing", tracing)

        async def test() -> None:
            options = {"otlp_traces_endpoint": collector.url, "local_prefill_tokens": 0}
            async with routed(**options) as router:
                entries = [router.router.add(server.url) for server in engines]
                await until(lambda: all(each.why_not(0.0) is None for each in entries), "both serve")
                headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
                reply = await router.http.post(path, json=body, headers=headers)
                assert reply.json()["usage"]["completion_tokens"] == 5

        run(test())
        for server in engines:
            server.assert_nothing_left()
            assert server.runtime.tracing is not None
            server.runtime.tracing.close()
    spans = collector.spans
    assert {span.trace_id for span in spans} == {TRACE}
    assert len({span.span_id for span in spans}) == len(spans) == 1 + 1 + 2 + 2 + 6

    root = only(collector.named("chat", "segue-router"))
    assert (root.parent, root.kind, root.error) == (SPAN, SERVER, "")
    chosen = only(collector.named("queue", "segue-router"))
    assert (chosen.parent, chosen.attributes["segue.router.choice"]) == (root.span_id, "pair")
    calls, inner = {}, {}
    for kind in ("prefill", "decode"):
        leg = only(collector.named(f"leg {kind}", "segue-router"))
        assert (leg.parent, leg.kind, leg.error) == (root.span_id, CLIENT, "")
        call = calls[kind] = only([span for span in spans if span.parent == leg.span_id])
        assert (call.name, call.service, call.kind) == (f"chat {MODEL}", "segue", SERVER)
        inner[kind] = {span.name: span for span in spans if span.parent == call.span_id}
    assert inner["prefill"].keys() == {"receive", "queue", "prefill"}
    assert inner["decode"].keys() == {"receive", "hand-over", "decode"}

    about = calls["decode"].attributes
    assert about["segue.leg.kind"] == "decode"
    assert about["gen_ai.operation.name"] == "chat" and about["gen_ai.provider.name"] == "segue"
    assert about["gen_ai.request.model"] == MODEL and about["gen_ai.request.max_tokens"] == 5
    assert about["gen_ai.request.temperature"] == 0.5
    assert about["gen_ai.usage.output_tokens"] == 5 and about["gen_ai.usage.input_tokens"] > 5
    assert about["gen_ai.response.finish_reasons"] == ["length"]
    assert 0 < about["gen_ai.response.time_to_first_chunk"] < 20
    order = [inner["prefill"]["queue"], inner["prefill"]["prefill"], inner["decode"]["decode"]]
    assert [span.start for span in order] == sorted(span.start for span in order)
    assert inner["decode"]["hand-over"].end == inner["decode"]["decode"].start
    slack = 2_000_000  # ns: the host's clock and Unix time are compared anew for each batch
    assert all(root.start - slack <= span.start <= span.end <= root.end + slack for span in spans)
