"""The spans of requests at a router, as a collector sees them."""

from __future__ import annotations

import asyncio

from tests.router.fake_servers import Exchange, FakeWorker, routed, run
from tests.support.collector import Collector, only

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}


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
