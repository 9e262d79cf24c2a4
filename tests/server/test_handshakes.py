"""A server that speaks TLS: its replies, and clients that do not."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from segue.server.connections import ConnectionLimits
from tests.conftest import WaitUntil
from tests.server.conftest import MODEL, Api
from tests.server.events import parse_events
from tests.server.live import LiveServer
from tests.support.certificates import make_certificate, tls_options


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("tls") / "server.pem")


@pytest.fixture(scope="module")
def secure(tiny_model: Path, certificate: Path) -> Iterator[LiveServer]:
    with LiveServer(tiny_model, certificate=certificate, **tls_options(certificate)) as server:
        yield server
        server.assert_nothing_left()


def address(server: LiveServer) -> tuple[str, int]:
    host, port = server.url.removeprefix("https://").split(":")
    return host, int(port)


def test_requests_and_streams_come_over_tls(secure: LiveServer) -> None:
    assert secure.url.startswith("https://127.0.0.1:")
    reply = Api(secure.client).complete("abc", max_tokens=3)
    assert reply.status_code == 200 and reply.headers["x-request-id"]
    large = "x" * (1 << 20)
    assert Api(secure.client).complete(large).status_code == 400, "the body arrives, and is too long"
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 50, "stream": True}
    with secure.client.stream("POST", "/v1/completions", json=body) as stream:
        assert list(parse_events(stream.iter_lines()))[-1] == "[DONE]"


def test_a_page_of_the_server_itself_may_send_requests(secure: LiveServer) -> None:
    own = secure.client.post("/flush_cache", headers={"origin": secure.url})
    other = secure.client.post("/flush_cache", headers={"origin": secure.url.replace("https", "http")})
    assert (own.status_code, other.status_code) == (200, 403)


def test_a_client_that_does_not_speak_tls_gets_no_answer(secure: LiveServer) -> None:
    with socket.create_connection(address(secure), timeout=60) as client:
        client.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with suppress(ConnectionResetError):
            assert not client.recv(1 << 16).startswith(b"HTTP")
    assert secure.client.get("/version").status_code == 200


@pytest.mark.parametrize(("head_s", "num_closed"), [(60.0, 9), (0.3, 12)])
def test_clients_that_never_end_their_handshake_give_way_and_have_little_time(
    tiny_model: Path, certificate: Path, head_s: float, num_closed: int
) -> None:
    limits = ConnectionLimits(max_connections=2, spare_connections=1, head_s=head_s)
    options = tls_options(certificate)
    with (
        LiveServer(tiny_model, started=False, certificate=certificate, limits=limits, **options) as server,
        ExitStack() as silent,
    ):
        clients = [socket.create_connection(address(server), timeout=60) for _ in range(12)]
        for client in clients:
            silent.enter_context(client)
        for client in clients[:num_closed]:
            assert client.recv(1) == b""
        assert server.client.get("/version").status_code == 200


def test_a_connection_that_gives_way_is_closed_whatever_its_client_does(
    tiny_model: Path, certificate: Path, wait_until: WaitUntil
) -> None:
    limits = ConnectionLimits(max_connections=1, spare_connections=1, evict_after_s=0.0)
    options = tls_options(certificate)
    context = ssl.create_default_context(cafile=str(certificate))
    with LiveServer(tiny_model, started=False, certificate=certificate, limits=limits, **options) as server:
        raw = socket.create_connection(address(server), timeout=60)
        with context.wrap_socket(raw, server_hostname="127.0.0.1"):  # it never reads the end of TLS
            assert server.client.get("/version").status_code == 200
            wait_until(lambda: len(server._http.server_state.connections) == 1)


def test_a_server_ends_although_clients_do_not_agree_to_the_end_of_tls(
    tiny_model: Path, certificate: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = ssl.create_default_context(cafile=str(certificate))
    with LiveServer(tiny_model, started=False, certificate=certificate, **tls_options(certificate)) as server:
        client = socket.create_connection(address(server), timeout=60)
        client = context.wrap_socket(client, server_hostname="127.0.0.1")
        client.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        data = b""
        while not data.endswith(b"}"):
            data += client.recv(1 << 16)
    client.close()
    assert "timeout graceful shutdown exceeded" not in caplog.text
