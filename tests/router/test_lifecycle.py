"""The router as a process: how it starts, drains and stops."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from tests.router.fake_servers import REPLY, STREAM, Exchange, FakeWorker, run, until
from tests.router.router_process import process, until_answered
from tests.router.test_relay import EVENTS, begin_only
from tests.support.certificates import make_certificate, tls_options


def test_it_relays_requests_and_ends_at_ctrl_c() -> None:
    async def test() -> None:
        async with process(FakeWorker()) as router:
            assert (await router.http.post("/generate", json={"text": "Hello"})).content == REPLY
            router.process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(router.process.wait(), 60) == 0

    run(test())


@pytest.mark.parametrize(("processes", "speaks_tls"), [("1", False), ("1", True), ("2", True)])
def test_sigterm_lets_running_requests_end(processes: str, speaks_tls: bool, tmp_path: Path) -> None:
    options = tls_options(make_certificate(tmp_path / "router.pem")) if speaks_tls else {}

    async def test() -> None:
        go_on = asyncio.Event()

        async def answer(exchange: Exchange) -> None:
            exchange.begin()
            exchange.send(EVENTS[0])
            await go_on.wait()
            exchange.send(EVENTS[1])
            exchange.end()

        async with (
            process(FakeWorker(answer), processes=processes, **options) as router,
            router.http.stream("POST", "/generate", json=STREAM) as reply,
        ):
            parts = reply.aiter_raw()
            assert await anext(parts) == EVENTS[0]
            assert router.url.startswith("https://") == speaks_tls
            router.process.send_signal(signal.SIGTERM)
            await until_answered(router.http, "/ready", lambda reply: reply.status_code == 503)
            go_on.set()
            assert [part async for part in parts] == [EVENTS[1]]
            assert await asyncio.wait_for(router.process.wait(), 60) == 0

    run(test())


def test_requests_that_last_longer_than_the_drain_are_ended() -> None:
    async def test() -> None:
        worker = FakeWorker(begin_only)
        async with (
            process(worker, drain_s="0.2", processes="2") as router,
            router.http.stream("POST", "/generate", json=STREAM) as reply,
        ):
            parts = reply.aiter_raw()
            await anext(parts)
            router.process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(router.process.wait(), 60) == 0
            await until(lambda: worker.exchanges[0].gone.is_set(), "the worker's connection is closed")
            assert b"the router ended before the reply did" in b"".join([part async for part in parts])

    run(test())


def is_free(url: str) -> bool:
    """Whether nothing listens at the router's port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2].rstrip("/")))) != 0


def has_ended(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return False
    return True


def test_no_process_outlives_the_one_that_was_started() -> None:
    async def test() -> None:
        async with process(FakeWorker(), processes="2") as router:
            children = router.children()
            assert len(children) == 2
            router.process.kill()
            await router.process.wait()
            await until(lambda: all(map(has_ended, children)), "all processes have ended")
            assert is_free(router.url)

    run(test())
