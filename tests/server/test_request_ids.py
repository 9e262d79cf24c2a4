"""Every reply says the id of its request, and the id aborts it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest

from segue.logs import logger, request_id
from segue.server.request_ids import id_extension, id_of, marked, taken_id
from tests.server.conftest import MODEL, Api
from tests.server.live import LiveServer
from tests.server.test_connections import RawClient

PATHS = {
    "/v1/completions": {"model": MODEL, "prompt": "abc", "max_tokens": 400, "ignore_eos": True},
    "/generate": {"text": "abc", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}},
}


def given(value: str | bytes) -> dict[str, str | bytes]:
    return {"X-Request-Id": value}


@pytest.mark.parametrize(
    ("value", "is_taken"),
    [
        (b"a b!~", True),
        (b"x" * 256, True),
        (b"x" * 257, False),
        (b"", False),
        (b"a\xe9", False),
        (b"a\tb", False),
    ],
)
def test_only_a_short_line_of_ascii_is_taken(value: bytes, is_taken: bool) -> None:
    found = taken_id([(b"host", b"x"), (b"x-request-id", value)])
    assert (found.encode() == value) == is_taken
    assert is_taken or len(found) == 32


def test_a_reply_has_the_clients_id_or_a_random_one(server: LiveServer) -> None:
    assert server.client.get("/version", headers=given("one")).headers["x-request-id"] == "one"
    assert server.client.get("/no/such", headers=given("two")).headers["x-request-id"] == "two"
    first, second = (server.client.get("/version").headers["x-request-id"] for _ in range(2))
    assert first != second and len(first) == 32


def test_a_refusal_by_the_connection_has_the_id_too(server: LiveServer) -> None:
    fields = b"Host: localhost\r\nX-Request-Id: r7\r\nTransfer-Encoding: chunked\r\n\r\n"
    head = b"POST /generate HTTP/1.1\r\n" + fields
    with RawClient(server, head, b"no length\r\n") as client:
        status, headers, _ = client.reply()
    assert (status, headers[b"x-request-id"]) == (400, b"r7")


@pytest.mark.parametrize("path", PATHS)
def test_the_id_aborts_every_request_that_has_it(server: LiveServer, path: str, wait_until: Any) -> None:
    pause = server.client.post("/pause_generation", json={"mode": "in_place"})
    assert pause.status_code == 200
    manager = server.runtime.manager

    async def reply(client: httpx.AsyncClient, name: str) -> str:
        answer = await client.post(path, json=PATHS[path], headers=given(name))
        assert answer.status_code == 200 and answer.headers["x-request-id"] == name
        body = answer.json()
        assert name not in (body.get("id", ""), body.get("meta_info", {}).get("id", ""))
        reason = (
            body["choices"][0]["finish_reason"] if "choices" in body else body["meta_info"]["finish_reason"]
        )
        return str(reason if isinstance(reason, str) else reason["type"])

    async def test() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            same = [asyncio.create_task(reply(client, "same")) for _ in range(2)]
            other = asyncio.create_task(reply(client, "other"))
            await asyncio.to_thread(wait_until, lambda: manager.num_requests == 3)
            assert (await client.post("/abort_request", json={"rid": "same"})).status_code == 200
            assert await asyncio.gather(*same) == ["abort", "abort"]
            assert not other.done()
            await client.post("/abort_request", json={"rid": "other"})
            await client.post("/continue_generation")
            assert await other == "abort"

    asyncio.run(test())
    assert manager._aliases == {}


def test_a_request_that_is_refused_leaves_no_alias(server: LiveServer, api: Api) -> None:
    reply = server.client.post("/generate", json={"text": "x" * 4000}, headers=given("too long"))
    assert reply.status_code == 400
    assert server.runtime.manager._aliases == {}


def test_lines_of_the_log_name_the_request_until_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    seen = []

    async def later() -> None:
        await asyncio.sleep(0.01)
        seen.append(request_id())

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(request_id())
        tasks.append(asyncio.create_task(later()))
        await send({"type": "http.response.start", "status": 418})
        raise ValueError

    async def server_part() -> None:
        try:
            await marked(app)(scope, None, send)  # type: ignore[arg-type]
        except ValueError:
            seen.append(request_id())  # here a server logs the error

    async def test() -> None:
        await asyncio.create_task(server_part())
        await tasks[0]

    async def send(message: Any) -> None:
        pass

    tasks: list[asyncio.Task[None]] = []
    scope = {"type": "http", "method": "GET", "raw_path": b"/%0A", "extensions": id_extension("r-9")}
    assert id_of(scope) == "r-9"
    with caplog.at_level(logging.DEBUG, logger.name):
        asyncio.run(test())
    assert seen == ["r-9", "r-9", ""]
    assert caplog.messages[0].startswith("GET /%0A: 418 after ")
