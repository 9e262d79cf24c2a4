"""Workers with HTTPS URLs, and the certificates that a router trusts."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from segue.errors import ConfigError
from segue.router.config import RouterConfig
from segue.router.upstream_connection import HIGH_BYTES
from tests.router.fake_servers import REPLY, STREAM, Exchange, FakeWorker, routed, run, until
from tests.support.certificates import make_certificate


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1, in one file with its key."""
    path = make_certificate(tmp_path_factory.mktemp("tls") / "worker.pem")
    path.write_text(path.read_text() + path.with_suffix(".key").read_text())
    return path


def server_side(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def test_a_worker_is_watched_and_gets_requests_over_https(certificate: Path) -> None:
    async def test() -> None:
        worker = FakeWorker()
        await worker.start(tls=server_side(certificate))
        async with routed(worker, worker_ca=str(certificate)) as router:
            reply = await router.generate()
            assert (reply.status_code, reply.content) == (200, REPLY)
            (listed,) = (await router.http.get("/workers")).json()["workers"]
            assert (listed["id"], listed["url"]) == (worker.id, worker.url)
            await worker.die()
            await until(lambda: not router.serves(worker), "its death is noticed")

    run(test())


def test_a_large_stream_comes_over_https_as_it_is(certificate: Path) -> None:
    async def test() -> None:
        async def answer(exchange: Exchange) -> None:
            exchange.begin()
            for _ in range(20):
                exchange.send(b"x" * HIGH_BYTES)
                await exchange.writer.drain()
            exchange.end()

        worker = FakeWorker(answer)
        await worker.start(tls=server_side(certificate))
        async with routed(worker, worker_ca=str(certificate)) as router:
            assert (await router.http.post("/generate", json=STREAM)).content == b"x" * HIGH_BYTES * 20

    run(test())


def test_a_certificate_that_nobody_vouches_for_is_refused_and_the_remedy_named(certificate: Path) -> None:
    async def test() -> None:
        worker = FakeWorker()
        await worker.start(tls=server_side(certificate))
        async with routed(worker, waits=False) as router:
            await until(lambda: "--worker-ca" in router.reason(worker), "it is refused")
            assert "self-signed certificate" in router.reason(worker)
            assert not worker.watchers

    run(test())


def test_https_urls_are_registered_too(certificate: Path) -> None:
    async def test() -> None:
        worker = FakeWorker()
        await worker.start(tls=server_side(certificate))
        async with routed(worker_ca=str(certificate)) as router:
            reply = await router.http.post("/workers", json={"url": worker.url})
            assert (reply.status_code, reply.json()["id"]) == (201, worker.id)
            await until(lambda: router.serves(worker), "it serves")
        await worker.die()

    run(test())


def test_a_file_without_certificates_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.touch()
    for path in (empty, tmp_path / "missing.pem"):
        with pytest.raises(ConfigError, match="no certificates can be read from there"):
            RouterConfig(worker_ca=str(path))
