"""What the web page shows of a router, in one process and in several."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Any

import pytest
from msgspec import structs

from segue.frontend.control_log import ControlLog
from segue.router.webpage import ShownWorker, note_changes
from tests.router.fake_servers import FakeWorker, routed, run
from tests.router.router_process import process

WORKER = ShownWorker(
    id="one",
    state="active",
    serves=True,
    reason="",
    breaker="closed",
    foreign=False,
    role="prefill",
    group="short",
    cohort="",
    epoch=0,
    weight_version="1",
    in_flight=0,
    decoding=0,
    queued_s=0.0,
    kv=0.0,
    output_per_s=0.0,
)


@pytest.mark.parametrize(
    ("changes", "text", "failed"),
    [
        (
            {"serves": False, "reason": "it is dead", "state": "dead"},
            "one gets no requests: it is dead",
            True,
        ),
        ({"serves": False, "reason": "paused", "state": "paused"}, "one gets no requests: paused", False),
        ({"role": "decode"}, "one: from prefill to decode", False),
        ({"weight_version": "2"}, "one serves version 2", False),
        ({"group": "long"}, "one goes to the group of long prompts", False),
        ({"in_flight": 3, "decoding": 2, "kv": 0.5}, None, False),
    ],
)
def test_changes_of_a_worker_are_logged(changes: dict[str, Any], text: str | None, failed: bool) -> None:
    log, after = ControlLog(), structs.replace(WORKER, **changes)
    note_changes(log, {"one": WORKER}, {"one": after})
    assert [(each.text, each.failed) for each in log.entries] == ([] if text is None else [(text, failed)])


def test_workers_that_come_go_and_serve_again_are_logged() -> None:
    log, idle = ControlLog(), structs.replace(WORKER, id="two", serves=False)
    note_changes(
        log, {"one": WORKER, "two": idle}, {"two": structs.replace(idle, serves=True), "new": WORKER}
    )
    assert [each.text for each in log.entries] == [
        "one has left",
        "two gets requests again",
        "new has come",
    ]


def test_the_stream_has_workers_and_what_happens_to_them() -> None:
    async def test() -> None:
        one, two = FakeWorker(), FakeWorker()
        async with routed(one, two) as router, router.http.stream("GET", "/page_events") as reply:
            lines = reply.aiter_lines()
            found: dict[str, Any] = {}
            await two.die()
            async for line in lines:
                found |= json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
                if any(two.id in entry["text"] for entry in found.get("log", [])):
                    break
            assert found["status"]["kind"] == "router"
            assert {each["id"]: each["serves"] for each in found["workers"]} == {one.id: True, two.id: False}
            router.router.is_draining = True
            async with asyncio.timeout(60):
                async for _ in lines:  # until it ends
                    pass

    run(test())


def test_several_processes_send_the_coordinator_s_stream_and_its_files() -> None:
    async def test() -> None:
        async with process(FakeWorker(), processes="2", api_key="key") as router:
            assert (await router.http.get("/page_events", headers={"authorization": "x"})).status_code == 401
            whole, head = await router.http.get("/page/main.js"), await router.http.head("/page/main.js")
            assert whole.headers["etag"] == head.headers["etag"]
            async with router.http.stream("GET", "/page_events") as reply:
                lines = reply.aiter_lines()
                assert '"kind":"router"' in await anext(lines)
                router.process.send_signal(signal.SIGTERM)  # a stream must not hold it up
                assert await asyncio.wait_for(router.process.wait(), 60) == 0

    run(test())
