"""The application of Ray Serve, with a small server in the router's place; it needs no Ray."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Mount, Route

from segue.integrations.ray.actors import RouterPlace
from segue.integrations.ray.ingress import FleetIngress


class Body:
    """A client that sends as much as is read, and does not say how much that will be."""

    def __init__(self, parts: AsyncIterator[bytes]) -> None:
        self._parts = parts

    async def __call__(self) -> dict[str, Any]:
        return {"type": "http.request", "body": await anext(self._parts), "more_body": True}


SECOND = threading.Event()  # lets the router send the second piece


class Router(BaseHTTPRequestHandler):
    """Says what it was asked; a stream's second piece waits until somebody has read the first one."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        names = sorted(name.lower() for name in self.headers if name.lower().startswith("x-"))
        pieces = [f"{self.path} {body.decode()} {names} ".encode(), b"second"]
        self.send_response(418)
        self.send_header("x-request-id", "abc")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for piece in pieces:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()
            assert SECOND.wait(10)
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def router() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Router) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


class Known(FleetIngress):
    """It knows where the router is."""

    def __init__(self, url: str) -> None:
        super().__init__("x")
        self._router = RouterPlace(url=url, max_body_mib=1)


def test_requests_and_replies_are_passed_on_whole(router: str) -> None:
    async def test() -> None:
        ingress = Known(router)

        async def endpoint(request: Any) -> Any:
            """Serve's replica calls it with a request, and sends the response."""
            return await ingress(request)

        async def pieces(scope: Any) -> tuple[list[dict[str, Any]], bytes]:
            sent: list[dict[str, Any]] = []

            async def send(message: Any) -> None:
                sent.append(message)
                if message.get("body", b"").startswith(b"/generate"):
                    assert not SECOND.is_set(), "the first piece comes before the second one is there"
                    SECOND.set()

            parts = [{"type": "http.request", "body": b"body"}]
            never = asyncio.Event()

            async def receive() -> Any:
                if parts:
                    return parts.pop()
                await never.wait()

            app = Starlette(
                routes=[Mount("/llm", routes=[Route("/{path:path}", endpoint, methods=["POST"])])]
            )
            await app(scope, receive, send)
            return sent, b"".join(each.get("body", b"") for each in sent)

        headers = [(b"x-own", b"1"), (b"connection", b"close"), (b"host", b"example.com")]
        scope = {
            "type": "http",
            "http_version": "1.1",
            "scheme": "http",
            "server": ("example.com", 80),
            "method": "POST",
            "path": "/llm/generate",
            "root_path": "",
            "query_string": b"a=1",
            "headers": headers,
        }
        sent, body = await pieces(scope)
        await ingress._session.close()
        assert sent[0]["status"] == 418 and (b"x-request-id", b"abc") in sent[0]["headers"]
        assert b"transfer-encoding" not in dict(sent[0]["headers"])
        assert body == b"/generate?a=1 body ['x-own'] second"

    SECOND.clear()
    asyncio.run(test())


def code_of(path: str, error: dict[str, Any]) -> str:
    """Returns the code of an error, which has the form of the route's API."""
    if path == "/generate":
        assert error["object"] == "error"
        return str(error["error_code"])
    assert error.get("type") == ("error" if path.startswith("/v1/messages") else None)
    return str(error["error"]["code"])


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/messages"])
def test_its_own_errors_have_the_form_of_the_route(path: str) -> None:
    read = []

    async def body() -> AsyncIterator[bytes]:
        for _ in range(64):
            read.append(1 << 18)
            yield b" " * (1 << 18)

    async def test() -> None:
        ingress = Known("http://127.0.0.1:1")
        route = Route("/{path:path}", ingress.__call__, methods=["POST"])
        transport = httpx.ASGITransport(Starlette(routes=[Mount("/llm", routes=[route])]))
        async with httpx.AsyncClient(transport=transport, base_url="http://serve/llm") as client:
            too_large = await client.post(path, content=b" " * (1 << 20) + b" ")
            assert (too_large.status_code, code_of(path, too_large.json())) == (413, "request_too_large")
            assert "larger max_body_mib in its RouterConfig" in too_large.text and "--" not in too_large.text
            response = await ingress(
                Request({"type": "http", "method": "POST", "path": path, "headers": []}, Body(body()))
            )
            assert response.status_code == 413 and sum(read) == 5 << 18, "no more is read than says so"
            assert ingress._router is not None
            away = await client.post(path, json={})
        await ingress._session.close()
        assert (away.status_code, code_of(path, away.json())) == (503, "no_router")
        assert away.headers["retry-after"] == "1"
        assert ingress._router is None, "it is asked for again"

    asyncio.run(test())
