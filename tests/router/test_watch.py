"""What the router learns over the connection for a worker's reports."""

from __future__ import annotations

import time
from typing import Any

import pytest

from segue.messages.fleet import FLEET_PROTOCOL, Role
from segue.router import fleet, watch
from tests.router.fake_servers import FakeWorker, routed, run, until
from tests.router.workers import report


def test_a_worker_serves_once_it_has_reported() -> None:
    async def test() -> None:
        worker = FakeWorker()
        worker.is_silent = True
        async with routed(worker, waits=False) as router:
            await until(lambda: router.reason(worker) == "it has not reported yet", "it is known")
            worker.is_silent = False
            await until(lambda: router.serves(worker), "it serves")

    run(test())


def test_an_engine_with_two_urls_is_one_worker_until_that_one_leaves() -> None:
    async def test() -> None:
        worker, same = (FakeWorker(incarnation="one process") for _ in range(2))
        async with routed(worker) as router:
            await same.start()
            router.router.add(same.url)
            await until(lambda: "same engine" in router.reason(same), "the second URL is noticed")
            text = f"this URL leads to the same engine as {worker.url}, which gets its requests"
            assert router.reason(same) == f"{text}; name each engine once"
            await router.http.delete(f"/workers/{worker.id}")
            await until(lambda: router.serves(same), "the second URL takes the place of the first")
        await same.die()

    run(test())


def test_a_worker_whose_process_ends_gets_no_requests_from_then_on() -> None:
    async def test() -> None:
        worker = FakeWorker()
        async with routed(worker) as router:
            began = time.monotonic()
            await worker.die()
            await until(lambda: not router.serves(worker), "it does not serve")
            assert time.monotonic() - began < fleet.SILENT_S, "its end is noticed, and not only its silence"
            assert (await router.generate()).status_code == 503

    run(test())


def test_a_worker_that_comes_back_serves_again() -> None:
    async def test() -> None:
        worker = FakeWorker()
        async with routed(worker) as router:
            await worker.die()
            await until(lambda: "no connection" in router.reason(worker), "it is lost")
            await worker.start(int(worker.url.rpartition(":")[2]))
            await until(lambda: router.serves(worker), "it serves again")

    run(test())


def test_a_silent_worker_counts_as_hung_until_it_reports_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (watch, fleet):
        monkeypatch.setattr(module, "SILENT_S", 0.3)

    async def test() -> None:
        worker = FakeWorker()
        async with routed(worker) as router:
            worker.is_silent = True
            await until(lambda: not router.serves(worker), "it does not serve")
            await until(lambda: "no report for 0.3 s" in router.reason(worker), "the reason is named")
            worker.is_silent = False
            await until(lambda: router.serves(worker), "it serves again")

    run(test())


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"trouble": "the weights are poisoned"}, "the weights are poisoned"),
        ({"paused": True}, "its generation is paused"),
        ({"state": "draining"}, "it is draining"),
        ({"heartbeat_age_s": 9.0}, "its scheduler has sent no heartbeat for 9.0 s"),
    ],
)
def test_a_worker_that_says_why_not_gets_no_requests(fields: dict[str, Any], reason: str) -> None:
    async def test() -> None:
        worker = FakeWorker()
        async with routed(worker) as router:
            worker.report = report(**fields)
            await until(lambda: router.reason(worker) == reason, reason)

    run(test())


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (401, "/watch was answered 401: give its admin key by --worker-admin-key"),
        (503, "/watch was answered 503: its engine is still starting, or has died"),
        (418, "/watch was answered 418: check the URL"),
    ],
)
def test_a_worker_that_cannot_be_watched_is_named_with_the_remedy(status: int, reason: str) -> None:
    async def test() -> None:
        worker = FakeWorker()
        worker.watch_status = status
        async with routed(worker, waits=False) as router:
            await until(lambda: router.reason(worker) == reason, reason)

    run(test())


@pytest.mark.parametrize(
    ("role", "protocol", "reason"),
    [
        (
            "prefill",
            FLEET_PROTOCOL,
            "its --role is prefill, and the router's --decode names it; start it with",
        ),
        ("both", 9, "it speaks version 9 of the reports, and the router 1; use the same version of Segue"),
    ],
)
def test_a_worker_that_does_not_fit_is_named_with_the_reason(role: Role, protocol: int, reason: str) -> None:
    async def test() -> None:
        worker = FakeWorker(role=role, protocol=protocol)
        worker.named = "decode"
        async with routed(worker, waits=False) as router:
            await until(lambda: router.reason(worker).startswith(reason), reason)

    run(test())
