"""A server registers itself at routers for as long as it serves."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from segue.config import EngineConfig
from segue.listener import own_address
from segue.server import registration
from segue.server.registration import keep_registered, reachable_url
from tests.router.fake_servers import Exchange, FakeWorker, routed, run, until
from tests.server.test_lifecycle import ServerProcess

OWN = "http://127.0.0.1:30000"


@pytest.fixture(autouse=True)
def register_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "REGISTER_PERIOD_S", 0.02)


@asynccontextmanager
async def registering(
    *statuses: int, url: str = OWN, **options: Any
) -> AsyncIterator[tuple[FakeWorker, asyncio.Task[None]]]:
    """Registers at a fake router, which answers with these statuses in turn, the last one again and again."""
    left = list(statuses)

    async def answer(exchange: Exchange) -> None:
        status = left.pop(0) if len(left) > 1 else left[0]
        await exchange.whole(b'{"message": "said the router"}', status)

    router = FakeWorker(answer)
    await router.start()
    task = asyncio.create_task(keep_registered(EngineConfig(register=router.url, **options), url))
    yield router, task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await router.die()


def bodies(router: FakeWorker) -> list[dict[str, Any]]:
    return [json.loads(exchange.body) for exchange in router.exchanges]


def test_a_server_registers_again_and_again_with_its_key() -> None:
    async def test() -> None:
        async with registering(201, register_key="secret") as (router, _):
            await until(lambda: len(router.exchanges) >= 3, "it registers three times")
            assert (
                bodies(router)[:3]
                == [{"url": OWN, "cohort": "", "epoch": 0, "role": None, "ttl_s": 15.0}] * 3
            )
            assert router.exchanges[0].headers["authorization"] == "Bearer secret"

    run(test())


def test_the_registration_ends_with_the_server() -> None:
    async def test() -> None:
        async with registering(201) as (router, task):
            await until(lambda: router.exchanges, "it registers")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert bodies(router)[-1]["ttl_s"] == 0.0

    run(test())


def test_a_refusal_is_logged_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with registering(401, 401, 201) as (router, _):
            await until(lambda: len(router.exchanges) >= 4, "it is tried again")

    with caplog.at_level(logging.WARNING, "segue"):
        run(test())
    (text,) = caplog.messages
    assert "HTTP 401: said the router; give its admin key by --register-key" in text


def test_a_router_that_is_not_there_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with registering(201) as (router, _):
            await until(lambda: router.exchanges, "it registers")
            port = int(router.url.rpartition(":")[2])
            await router.die()
            router.exchanges.clear()
            await until(lambda: caplog.messages, "it is noticed")
            await router.start(port)
            await until(lambda: router.exchanges, "it registers again")

    with caplog.at_level(logging.WARNING, "segue"):
        run(test())


def test_the_url_that_a_router_uses_can_be_given() -> None:
    async def test() -> None:
        async with registering(201, register_url="http://gpu-1:80") as (router, _):
            await until(lambda: router.exchanges, "it registers")
            assert bodies(router)[0]["url"] == "http://gpu-1:80"

    run(test())


@pytest.mark.parametrize(
    ("url", "router", "reachable"),
    [
        ("http://10.0.0.7:30000", "http://10.0.0.1:8000", "http://10.0.0.7:30000"),
        ("http://0.0.0.0:30000", "http://127.0.0.1:8000", "http://127.0.0.1:30000"),
        ("http://[::]:30000", "http://127.0.0.1", "http://127.0.0.1:30000"),
        ("http://0.0.0.0:30000", "http://[::1]:8000", "http://[::1]:30000"),
    ],
)
def test_a_server_that_listens_everywhere_names_its_address_towards_the_router(
    url: str, router: str, reachable: str
) -> None:
    if "[::1]" in reachable:
        try:
            own_address("::1", 80)
        except OSError:
            pytest.skip("this machine has no IPv6")
    assert reachable_url(url, router) == reachable


def test_a_server_process_serves_behind_a_router_until_it_is_stopped(tiny_model: Path) -> None:
    async def test() -> None:
        async with routed() as router:
            router.router.discover()
            with ServerProcess(tiny_model, register=router.url) as server:
                url = await asyncio.to_thread(server.ready)
                await until(lambda: router.registry.at(url) is not None, "it has registered")
                (entry,) = router.registry
                await until(lambda: entry.why_not(time.monotonic()) is None, "it serves")
                reply = await router.generate(sampling_params={"max_new_tokens": 2})
                assert reply.status_code == 200
                server.process.send_signal(signal.SIGTERM)
                await until(lambda: not list(router.registry), "it is forgotten")
                assert await asyncio.to_thread(server.process.wait, 60) == 0

    run(test())
