"""How a process of the router ends, on a real socket."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from segue.router.draining import drain
from tests.router.fake_servers import STREAM, FakeWorker, routed, run, until
from tests.router.test_relay import begin_only


@pytest.mark.parametrize(("seconds", "is_over"), [(0.05, False), (60.0, True)])
def test_it_waits_no_longer_than_it_may(seconds: float, is_over: bool) -> None:
    async def test() -> None:
        worker = FakeWorker(begin_only)
        async with routed(worker) as router, router.http.stream("POST", "/generate", json=STREAM):
            await asyncio.wait_for(drain(router.router, router.server, seconds, lambda: is_over), 30)
            assert router.registry.holds.num_requests == 1

    run(test())


def test_it_waits_for_requests_in_flight_and_refuses_others() -> None:
    async def test() -> None:
        worker = FakeWorker(begin_only)
        async with routed(worker) as router:
            async with router.http.stream("POST", "/generate", json=STREAM) as reply:
                parts = reply.aiter_raw()
                await anext(parts)
                draining = asyncio.create_task(drain(router.router, router.server, 60.0, lambda: False))
                await until(lambda: router.router.is_draining, "it drains")
                async with httpx.AsyncClient(base_url=router.url, verify=False) as other:
                    assert (await other.post("/generate", json=STREAM)).status_code == 503
                assert not draining.done()
            await asyncio.wait_for(draining, 60)

    run(test())
