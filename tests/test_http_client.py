"""Requests to other servers: the key is sent, errors are answers, and redirects are not followed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from segue.http_client import open_url


class Answers(BaseHTTPRequestHandler):
    """Answers with the request's method, key and body; `/missing` and `/moved` with other statuses."""

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0))).decode()
        content = json.dumps([self.command, self.headers.get("authorization"), body]).encode()
        self.send_response({"/missing": 404, "/moved": 302}.get(self.path, 200))
        self.send_header("location", "/elsewhere")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = answer

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(60)


def ask(url: str, body: bytes | None = None, key: str | None = None, **options: Any) -> tuple[int, Any]:
    with open_url(url, body, api_key=key, timeout_s=10, **options) as response:
        return response.status, json.loads(response.read())


def test_a_body_is_posted_and_a_key_is_sent(url: str) -> None:
    assert ask(url) == (200, ["GET", None, ""])
    assert ask(url, b"{}", "secret") == (200, ["POST", "Bearer secret", "{}"])


def test_an_error_is_an_answer(url: str) -> None:
    assert ask(f"{url}/missing", b"{}") == (404, ["POST", None, "{}"])


def test_a_redirect_is_not_followed(url: str) -> None:
    assert ask(f"{url}/moved", key="secret")[0] == 302


def test_the_environments_proxy_is_used_only_if_asked_for(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert ask(url)[0] == 200
    with pytest.raises(OSError, match="refused"):
        ask(url, by_proxy=True)
