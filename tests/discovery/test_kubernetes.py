"""Discovery by Kubernetes, with a fake API server that keeps Leases."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

pytest.importorskip("kubernetes_asyncio", reason="install segue[kubernetes]")

from segue.discovery import kubernetes
from segue.discovery.kubernetes import KubernetesDiscovery
from segue.discovery.opening import open_discovery
from segue.discovery.record import pack_record
from segue.errors import ConfigError, DiscoveryError
from tests.discovery.contract import CHECKS, NAMES, Check, Watching, record, until
from tests.support.fake_kubernetes import FakeKubernetes

TTL_S = 2.0


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "kubeconfig"
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    return path


def served(kubeconfig: Path, test: Callable[[FakeKubernetes], Awaitable[None]]) -> None:
    """Runs a test with a fake API server."""

    async def run() -> None:
        server = FakeKubernetes(kubeconfig)
        await server.start()
        try:
            await asyncio.wait_for(test(server), 100)
        finally:
            await server.stop()

    asyncio.run(run())


@pytest.mark.parametrize("check", CHECKS, ids=NAMES)
def test_what_every_backend_does(check: Check, kubeconfig: Path) -> None:
    async def test(server: FakeKubernetes) -> None:
        await check(lambda: open_discovery("kubernetes", None, ttl_s=TTL_S))

    served(kubeconfig, test)


def test_a_lease_has_the_epoch_the_holder_and_the_record(kubeconfig: Path) -> None:
    async def test(server: FakeKubernetes) -> None:
        engine = KubernetesDiscovery("", TTL_S)
        assert await engine.claim_epoch("default", 3)
        await engine.put(record(epoch=3))
        assert sorted(server.leases) == ["segue.default", "segue.default.engine-a"]
        spec = server.leases["segue.default.engine-a"]["spec"]
        assert (spec["holderIdentity"], spec["leaseTransitions"], spec["leaseDurationSeconds"]) == (
            "engine-a", 3, TTL_S,
        )  # fmt: skip
        assert server.leases["segue.default"]["spec"] == {"leaseTransitions": 3}
        await engine.close()

    served(kubeconfig, test)


def test_a_record_lives_as_long_as_it_is_renewed(kubeconfig: Path) -> None:
    async def test(server: FakeKubernetes) -> None:
        engine, router = KubernetesDiscovery("", TTL_S), KubernetesDiscovery("", TTL_S)
        await engine.put(record())
        end = time.monotonic() + 1.5 * TTL_S
        while time.monotonic() < end:
            assert len(await router.list()) == 1
            await asyncio.sleep(0.1)
        assert engine._keeping is not None
        engine._keeping.cancel()  # as if its process had died
        version = server.leases["segue.default.engine-a"]["metadata"]["resourceVersion"]
        died_at = time.monotonic()
        while await router.list():
            assert time.monotonic() < died_at + 60
            await asyncio.sleep(0.02)
        assert time.monotonic() >= died_at + TTL_S / 2
        assert server.leases["segue.default.engine-a"]["metadata"]["resourceVersion"] == version
        await engine.close()
        await router.close()

    served(kubeconfig, test)


def test_a_change_is_told_by_the_watch_and_not_by_the_next_look(
    kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "POLL_S", 1000.0)

    async def test(server: FakeKubernetes) -> None:
        engine, router = KubernetesDiscovery("", TTL_S), KubernetesDiscovery("", TTL_S)
        watching = Watching(router)
        await until(lambda: server.num_watches == 1 and bool(watching.told))
        await engine.put(record())
        await watching.shows(record())
        await engine.close()
        await watching.shows()
        await watching.close()
        await router.close()

    served(kubeconfig, test)


def test_a_lease_that_was_deleted_or_written_by_others_is_written_again(kubeconfig: Path) -> None:
    async def test(server: FakeKubernetes) -> None:
        engine, router = KubernetesDiscovery("", TTL_S), KubernetesDiscovery("", TTL_S)
        await engine.put(record())
        server.leases.clear()
        await until(lambda: "segue.default.engine-a" in server.leases)
        server.leases["segue.default.engine-a"]["metadata"]["resourceVersion"] = "1000"
        await engine.put(record(epoch=2))
        assert list(await router.list()) == [record(epoch=2)]
        await engine.close()
        await router.close()

    served(kubeconfig, test)


def test_a_lease_of_others_does_no_harm(kubeconfig: Path) -> None:
    async def test(server: FakeKubernetes) -> None:
        engine = KubernetesDiscovery("", TTL_S)
        labels = {kubernetes.LABEL: "default"}
        for number, annotation in enumerate(["", "{}", pack_record(record("b")).decode()]):
            metadata = {"name": f"x{number}", "labels": labels, "resourceVersion": "1"}
            metadata["annotations"] = {kubernetes.ANNOTATION: annotation}
            server.leases[f"x{number}"] = {"metadata": metadata}
        server.leases["segue.default"] = {"metadata": {"name": "segue.default", "resourceVersion": "1"}}
        await engine.put(record())
        assert list(await engine.list()) == [record()]
        with pytest.raises(DiscoveryError, match="in namespace default failed"):
            await engine.highest_epoch("default")
        await engine.close()

    served(kubeconfig, test)


def test_the_leases_of_engines_that_are_long_gone_are_deleted(
    kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "LONG_GONE", 2)

    async def test(server: FakeKubernetes) -> None:
        for cohort, engine in (("default", "engine-b"), ("other", "engine-c")):
            dead = KubernetesDiscovery("", TTL_S)
            await dead.put(record(cohort=cohort, engine=engine))
            dead._put.clear()  # it is killed: nobody renews its Lease
            await dead.close()
        living = KubernetesDiscovery("", TTL_S)
        await living.claim_epoch("default", 3)
        await living.put(record())
        kept = {"segue.default", "segue.default.engine-a", "segue.other.engine-c"}
        assert set(server.leases) == {*kept, "segue.default.engine-b"}
        await until(lambda: set(server.leases) == kept)
        await living.close()

    served(kubeconfig, test)


def test_an_api_server_that_refuses_is_named(kubeconfig: Path) -> None:
    async def test(server: FakeKubernetes) -> None:
        server.token = "another"
        engine = KubernetesDiscovery("", TTL_S)
        for call in (engine.put(record()), engine.list(), engine.claim_epoch("default", 1)):
            with pytest.raises(DiscoveryError, match=r"in namespace default failed: HTTP 403 .*the Role"):
                await call
        await engine.close()

    served(kubeconfig, test)


def test_an_api_server_that_is_away_is_named(kubeconfig: Path) -> None:
    async def test(server: FakeKubernetes) -> None:
        await server.stop()
        engine = KubernetesDiscovery("", TTL_S)
        with pytest.raises(DiscoveryError, match="discovery by Kubernetes in namespace default failed"):
            await engine.list()
        await engine.close()

    served(kubeconfig, test)


def test_outside_of_a_cluster_a_file_is_needed(kubeconfig: Path) -> None:
    with pytest.raises(ConfigError, match=r"this is no pod, and there is no file .*kubeconfig"):
        KubernetesDiscovery("", TTL_S)


def test_a_library_that_is_missing_is_named(kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio", None)
    with pytest.raises(ConfigError, match=r"needs the library kubernetes-asyncio.*segue\[kubernetes\]"):
        KubernetesDiscovery("", TTL_S)


@pytest.mark.parametrize("text", ["not: [valid", "[1, 2]", "", "clusters: 3"])
def test_a_broken_file_of_the_api_server_is_an_error_of_discovery(kubeconfig: Path, text: str) -> None:
    kubeconfig.write_text(text)

    async def run() -> None:
        discovery = KubernetesDiscovery("default", TTL_S)
        with pytest.raises(DiscoveryError, match=r"discovery by Kubernetes failed: .*kubeconfig"):
            await discovery.highest_epoch("default")
        await discovery.close()

    asyncio.run(run())
