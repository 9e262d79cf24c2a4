"""Discovery by etcd, with a real server of Debian's package etcd-server where it is installed."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from segue.discovery.base import DiscoveryBackend
from segue.discovery.etcd import ENGINES, EPOCHS, EtcdDiscovery
from segue.discovery.opening import open_discovery
from segue.errors import ConfigError, DiscoveryError
from tests.discovery.contract import CHECKS, NAMES, Check, Watching, record
from tests.support.child import start_child
from tests.support.ports import free_port

ETCD = shutil.which("etcd")
needs_etcd = pytest.mark.skipif(
    ETCD is None, reason="etcd is not installed (Debian: apt install etcd-server)"
)
TTL_S = 1.0  # the least of a server with this time for elections


class EtcdServer:
    """An etcd server of one member."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        client, peer = free_port(), free_port()
        self.url, self._peer = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
        self._num_starts = 0
        self.start()

    def start(self) -> None:
        """Starts a server that knows nothing, and waits until it answers."""
        assert ETCD is not None
        self._num_starts += 1
        self._process = start_child(
            [
                *(ETCD, "--data-dir", str(self._directory / str(self._num_starts)), "--log-level", "error"),
                *("--listen-client-urls", self.url, "--advertise-client-urls", self.url),
                *("--listen-peer-urls", self._peer, "--initial-advertise-peer-urls", self._peer),
                *("--initial-cluster", f"default={self._peer}"),
                *("--heartbeat-interval", "20", "--election-timeout", "200"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 20
        while not self._is_healthy():
            assert time.monotonic() < deadline and self._process.poll() is None
            time.sleep(0.02)

    def _is_healthy(self) -> bool:
        try:
            return requests.get(f"{self.url}/health", timeout=1).ok
        except requests.RequestException:
            return False

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path_factory.mktemp("etcd"))
    yield server
    server.stop()


@pytest.fixture
def server(running: EtcdServer) -> EtcdServer:
    """The server without any keys."""
    discovery = EtcdDiscovery(running.url, TTL_S)
    for prefix in (ENGINES, EPOCHS):
        discovery._client.delete_prefix(prefix)
    asyncio.run(discovery.close())
    return running


@needs_etcd
@pytest.mark.parametrize("check", CHECKS, ids=NAMES)
def test_what_every_backend_does(check: Check, server: EtcdServer) -> None:
    def make() -> DiscoveryBackend:
        return open_discovery("etcd", server.url, ttl_s=TTL_S)

    asyncio.run(check(make))


@needs_etcd
def test_a_record_lives_as_long_as_it_is_renewed_and_its_time_to_live_delays_no_successor(
    server: EtcdServer,
) -> None:
    async def run() -> None:
        dead, new, router = (EtcdDiscovery(server.url, TTL_S) for _ in range(3))
        watching = Watching(router)
        await dead.put(record("engine-a", 1))
        await watching.shows(record("engine-a", 1))
        end = time.monotonic() + 1.5 * TTL_S
        while time.monotonic() < end:
            assert len(await router.list()) == 1  # it was renewed
            await asyncio.sleep(0.1)
        assert dead._keeping is not None
        dead._keeping.cancel()  # as if its process had died
        await new.put(record("engine-b", 2))
        await watching.shows(record("engine-a", 1), record("engine-b", 2))
        await watching.shows(record("engine-b", 2))
        await watching.close()
        dead._put.clear()
        for backend in (dead, new, router):
            await backend.close()

    asyncio.run(run())


@needs_etcd
def test_a_record_that_the_server_has_lost_is_put_again(server: EtcdServer) -> None:
    async def run() -> None:
        engine, router = EtcdDiscovery(server.url, TTL_S), EtcdDiscovery(server.url, TTL_S)
        watching = Watching(router)
        await engine.put(record())
        await watching.shows(record())
        server.stop()
        with pytest.raises(DiscoveryError, match=rf"discovery by etcd at {server.url} failed"):
            await engine.claim_epoch("default", 1)
        assert list(watching.told[-1]) == [record()]  # what is known stays known
        server.start()  # with no keys
        await watching.shows()
        await watching.shows(record())
        await watching.close()
        await engine.close()
        await router.close()

    asyncio.run(run())


def test_a_server_that_is_not_there_is_named() -> None:
    async def run() -> None:
        port = free_port()
        discovery = EtcdDiscovery(f"http://127.0.0.1:{port}", TTL_S)
        for call in (discovery.put(record()), discovery.list(), discovery.highest_epoch("default")):
            with pytest.raises(DiscoveryError, match=rf"discovery by etcd at http://127.0.0.1:{port} failed"):
                await call
        await discovery.close()

    asyncio.run(run())


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "etcd3gw.client", None)
    with pytest.raises(ConfigError, match=r"needs the library etcd3gw .*install 'segue\[etcd\]'"):
        EtcdDiscovery("http://127.0.0.1:1", TTL_S)
