"""The spans of requests at a router and its engines, as a collector sees them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from tests.router.fake_servers import Exchange, FakeWorker, routed, run, until
from tests.server.leg_fleet import MODEL, OPTIONS
from tests.server.live import LiveServer
from tests.support.collector import Collector, SeenSpan

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
SERVER, CLIENT = 2, 3  # kinds of OTLP


def only(spans: list[SeenSpan]) -> SeenSpan:
    assert len(spans) == 1, [(span.service, span.name) for span in spans]
    return spans[0]


async def at_pair(url: str, router: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        prompt = {"messages": [{"role": "user", "content": "Hello there, how are you?"}], "model": MODEL}
        return await client.post(
            "/v1/chat/completions",
            json=prompt | {"max_tokens": 5, "ignore_eos": True, "temperature": 0.5, "stream": False},
            headers=HEADERS,
        )


def test_a_request_is_one_tree_through_router_prefill_and_decode(tiny_model: Path) -> None:
    with Collector() as collector:
        options = OPTIONS | {"otlp_traces_endpoint": collector.url}
        with (
            LiveServer(tiny_model, role="prefill", disaggregation_bootstrap_port=0, **options) as prefill,
            LiveServer(tiny_model, role="decode", **options) as decode,
        ):

            async def test() -> None:
                async with routed(
                    otlp_traces_endpoint=collector.url, local_prefill_tokens=0, waits=False
                ) as router:
                    for server in (prefill, decode):
                        router.router.add(server.url)
                    await until(
                        lambda: sum(entry.why_not(0.0) is None for entry in router.registry) == 2,
                        "both serve",
                    )
                    reply = await at_pair(router.url, router)
                    assert reply.json()["usage"]["completion_tokens"] == 5

            run(test())
    root = only(collector.named("chat", "segue-router"))
    assert (root.parent, root.kind, root.error) == (SPAN, SERVER, "")
    legs = {kind: only(collector.named(f"leg {kind}", "segue-router")) for kind in ("prefill", "decode")}
    calls = collector.named(f"chat {MODEL}", "segue")
    by_leg = {
        kind: only([call for call in calls if call.parent == leg.span_id]) for kind, leg in legs.items()
    }
    tree = {span.span_id: span.parent for span in collector.spans}
    assert {span.trace_id for span in collector.spans} == {TRACE} and len(tree) == len(collector.spans)
    for leg in legs.values():
        assert (leg.parent, leg.kind, leg.error) == (root.span_id, CLIENT, "")
    found = {
        kind: sorted(span.name for span in collector.spans if span.parent == call.span_id)
        for kind, call in by_leg.items()
    }
    assert found == {"prefill": ["prefill", "queue", "receive"], "decode": ["decode", "hand-over", "receive"]}
    chosen = only([span for span in collector.spans if span.parent == root.span_id and span.name == "queue"])
    assert chosen.attributes["segue.router.choice"] == "pair"
    assert len(collector.spans) == 1 + 1 + 2 + 2 + 6

    about = by_leg["decode"].attributes
    assert by_leg["decode"].kind == SERVER and about["segue.leg.kind"] == "decode"
    assert about["gen_ai.operation.name"] == "chat" and about["gen_ai.provider.name"] == "segue"
    assert about["gen_ai.request.model"] == MODEL and about["gen_ai.request.max_tokens"] == 5
    assert about["gen_ai.request.temperature"] == 0.5
    assert about["gen_ai.usage.output_tokens"] == 5 and about["gen_ai.usage.input_tokens"] > 5
    assert about["gen_ai.response.finish_reasons"] == ["length"]
    assert 0 < about["gen_ai.response.time_to_first_chunk"] < 20
    # One clock for all: what comes later begins later, and nothing outlasts what it is part of.
    inner = {
        kind: {s.name: s for s in collector.spans if s.parent == c.span_id} for kind, c in by_leg.items()
    }
    order = [inner["prefill"]["queue"], inner["prefill"]["prefill"], inner["decode"]["decode"]]
    assert [span.start for span in order] == sorted(span.start for span in order)
    assert inner["decode"]["hand-over"].end == inner["decode"]["decode"].start
    slack = 2_000_000  # the two clocks are compared anew for each batch
    assert all(root.start - slack <= span.start <= span.end <= root.end + slack for span in collector.spans)


def test_a_request_that_is_resumed_stays_in_its_trace() -> None:
    async def break_off(exchange: Exchange) -> None:
        exchange.begin()
        exchange.send(b"data: 1\n\n")
        await exchange.writer.drain()
        exchange.cut()

    async def go_on(exchange: Exchange) -> None:
        exchange.begin()
        exchange.send(b"data: 2\n\n")
        exchange.end(b"data: [DONE]\n\n")

    async def answer(exchange: Exchange) -> None:
        await (go_on if exchange.given else break_off)(exchange)

    with Collector() as collector:

        async def test() -> None:
            one, two = FakeWorker(answer), FakeWorker(answer)
            async with routed(one, two, otlp_traces_endpoint=collector.url) as router:
                reply = await router.http.post(
                    "/generate", json={"text": "a", "stream": True}, headers=HEADERS
                )
                assert reply.content.endswith(b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n")
            given = {header for each in (one, two) for e in each.exchanges for header in told(e)}
            legs = collector.named("leg whole")
            assert [bool(leg.error) for leg in legs] == [True, False]
            assert [leg.attributes["segue.leg.tokens_before"] for leg in legs] == [0, 1]
            assert given == {(f"00-{TRACE}-{leg.span_id}-01", "vendor=1") for leg in legs}
            root = only(collector.named("text_completion"))
            assert [leg.parent for leg in legs] == [root.span_id] * 2 and root.parent == SPAN
            assert root.error == "" and {span.trace_id for span in collector.spans} == {TRACE}

        run(test())


def told(exchange: Exchange) -> list[tuple[str, str]]:
    return [(exchange.headers["traceparent"], exchange.headers["tracestate"])]


def test_a_router_without_spans_passes_the_headers_on() -> None:
    async def test() -> None:
        worker = FakeWorker()
        async with routed(worker) as router:
            await router.http.post("/generate", json={"text": "a"}, headers=HEADERS)
            await router.http.post("/pause_generation", json={}, headers=HEADERS)
            seen = [told(exchange) for exchange in worker.exchanges if exchange.path != "/watch"]
            assert seen == [[(HEADERS["traceparent"], HEADERS["tracestate"])]] * len(seen) and len(seen) >= 2

    run(test())


def test_requests_without_a_trace_begin_one_each_and_a_trace_that_is_not_kept_has_no_spans() -> None:
    with Collector() as collector:

        async def test() -> None:
            worker = FakeWorker()
            async with routed(worker, otlp_traces_endpoint=collector.url) as router:
                await asyncio.gather(*(router.generate() for _ in range(3)))
                no = {"traceparent": HEADERS["traceparent"][:-2] + "00"}
                await router.http.post("/generate", json={"text": "a"}, headers=no)
                parents = [exchange.headers["traceparent"] for exchange in worker.exchanges]
                assert parents[-1].startswith(f"00-{TRACE}-") and parents[-1].endswith("-00")
            roots = collector.named("text_completion")
            assert len({root.trace_id for root in roots}) == len(roots) == 3
            assert all(root.parent == "" for root in roots) and len(collector.spans) == 3 * 3

        run(test())
