"""Probes against a real socket."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from pathlib import Path

import pytest

from segue.cluster import probe
from segue.cluster.probe import ReadinessProbe, is_ready
from segue.failover.pod import HttpGet, Probe
from segue.failover.prober import ask
from tests.support.certificates import make_certificate, tls_options

OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"


def asked(answer: bytes | None, min_serving: int = 0) -> tuple[bool, bytes]:
    """Whether a child that answers like this is ready, and the request that it gets; None: it is silent."""
    requests = []

    async def test() -> bool:
        ended = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            requests.append(await reader.readuntil(b"\r\n\r\n"))
            if answer is None:
                await reader.read()
            else:
                writer.write(answer)
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            ended.set()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            url = f"http://127.0.0.1:{port}/ready"
            found = await is_ready(ReadinessProbe(url=url, min_serving=min_serving))
            await asyncio.wait_for(ended.wait(), 60)
        return found

    return asyncio.run(test()), requests[0]


@pytest.mark.parametrize(
    ("answer", "min_serving", "expected"),
    [
        (OK, 0, True),
        (OK + b'{"serving": 2}', 2, True),
        (OK + b'{"serving": 1}', 2, False),
        (OK + b'{"status": "ok"}', 1, False),
        (OK + b"[1]", 1, False),
        (OK + b"no json", 1, False),
        (OK + b'{"serving": "2"}', 1, False),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n" + b'{"serving": 2}', 0, False),
        (b"HTTP/1.1 2000\r\n\r\n", 0, False),
        (b"\x00\xff", 0, False),
        (b"", 0, False),
    ],
)
def test_an_answer_decides(answer: bytes, min_serving: int, expected: bool) -> None:
    is_so, request = asked(answer, min_serving)
    assert is_so is expected
    assert request.startswith(b"GET /ready HTTP/1.0\r\nHost: 127.0.0.1:")


def test_silence_means_that_it_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "ANSWER_S", 0.05)
    assert not asked(None)[0]


def test_an_endless_answer_is_not_read_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "ANSWER_BYTES", 1000)
    assert not asked(OK + b'{"serving": 2, "x": "%s"}' % (b"x" * 5000), 1)[0]


def test_a_child_that_speaks_tls_is_asked_so_whatever_its_certificate_is(tmp_path: Path) -> None:
    """Both by the probe of its start and by those of its manifest."""
    files = tls_options(make_certificate(tmp_path / "child.pem"))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(files["ssl_certfile"], files["ssl_keyfile"])

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(OK + b'{"serving": 1}')
        writer.close()

    async def test() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls) as server:
            port = server.sockets[0].getsockname()[1]
            for scheme, answers in (("https", True), ("http", False)):
                url = f"{scheme}://127.0.0.1:{port}/ready"
                assert await is_ready(ReadinessProbe(url=url, min_serving=1)) is answers
                get = HttpGet(path="/ready", port=port, scheme="HTTPS" if answers else "HTTP")
                failure = await ask(Probe(action=get, timeout_s=10), {}, no_command)
                assert (failure is None) is answers

    asyncio.run(test())


async def no_command(command: tuple[str, ...]) -> str | None:
    raise AssertionError(command)


def test_nobody_listening_means_that_it_is_not_ready() -> None:
    assert not asyncio.run(is_ready(ReadinessProbe(url="http://127.0.0.1:9/ready")))
