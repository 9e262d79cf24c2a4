"""The manifest of a pod, as a machine without Kubernetes reads it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from segue.errors import ManifestError
from segue.failover.pod import Execution, HttpGet, Probe, ProbeKind, bundled_manifest, read_pod


def pod(**container: Any) -> str:
    found = {"name": "engine", "ports": [{"name": "system", "containerPort": 9090}]} | container
    return yaml.safe_dump({"kind": "Pod", "spec": {"containers": [found]}})


def test_containers_come_in_the_order_of_their_start() -> None:
    containers = read_pod(bundled_manifest())
    assert list(containers) == ["gms-holder", "gms", "router", "engine-a", "engine-b"]
    assert [each.is_sidecar for each in containers.values()] == [True, True, False, False, False]
    assert containers["engine-b"].ports == {"api": 30002, "system": 9092}
    assert "--engine-id=engine-b" in containers["engine-b"].arguments


def test_the_probes_of_the_manifest_are_those_of_the_design() -> None:
    containers = read_pod(bundled_manifest())
    for name in ("engine-a", "engine-b"):
        assert containers[name].probes == {
            ProbeKind.STARTUP: Probe(
                action=HttpGet(path="/startup", port="system"),
                period_s=10,
                timeout_s=2,
                failure_threshold=720,
            ),
            ProbeKind.LIVENESS: Probe(
                action=HttpGet(path="/live", port="system"), period_s=5, timeout_s=2, failure_threshold=3
            ),
        }, "a parked engine would keep its pod unready: it has no readiness probe"
    startup = containers["gms"].probes[ProbeKind.STARTUP]
    assert startup.action == Execution(command=("segue", "gms", "ready", "--gms-dir=/run/segue/gms"))
    assert (startup.period_s, startup.failure_threshold) == (1, 300)
    for name, words in (("gms", ("ready",)), ("gms-holder", ("ready", "--holder"))):
        assert containers[name].probes[ProbeKind.LIVENESS] == Probe(
            action=Execution(command=("segue", "gms", *words, "--gms-dir=/run/segue/gms")),
            initial_delay_s=10,
            period_s=10,
            timeout_s=10,
            failure_threshold=2,
        ), "engines go on without it, and it takes everything back when it is started again"
    assert containers["gms-holder"].probes.keys() == {ProbeKind.LIVENESS}
    assert containers["router"].probes[ProbeKind.READINESS].action == HttpGet(path="/ready", port="http")


def test_a_probe_may_ask_by_https() -> None:
    probe = {"httpGet": {"path": "/live", "port": 9090, "scheme": "HTTPS"}}
    found = read_pod(pod(livenessProbe=probe))["engine"].probes[ProbeKind.LIVENESS]
    assert found.action == HttpGet(path="/live", port=9090, scheme="HTTPS")


def test_times_that_are_left_out_are_those_of_kubernetes() -> None:
    probe = {"httpGet": {"path": "/live", "port": 9090}}
    found = read_pod(pod(livenessProbe=probe))["engine"].probes[ProbeKind.LIVENESS]
    assert (found.initial_delay_s, found.period_s, found.timeout_s) == (0, 10, 1)
    assert (found.success_threshold, found.failure_threshold) == (1, 3)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a: [", "the manifest is no YAML"),
        ("kind: Service", "the manifest's kind is 'Service'; give that of a Pod or a Deployment"),
        ("[1]", "the manifest's kind is None"),
        (pod(livenessProbe={"tcpSocket": {"port": 1}}), "'engine', livenessProbe has tcpSocket; exactly one"),
        (pod(startupProbe={}), "startupProbe has nothing; exactly one of httpGet and exec is understood"),
        (
            pod(startupProbe={"httpGet": {"port": "system", "host": "elsewhere"}}),
            "startupProbe: httpGet has host; path, port and scheme alone are understood",
        ),
        (
            pod(startupProbe={"httpGet": {"port": "system", "scheme": "https"}}),
            "startupProbe: httpGet's scheme is 'https'; give HTTP or HTTPS",
        ),
        (
            pod(startupProbe={"httpGet": {"port": "metrics"}}),
            "startupProbe: its port 'metrics' is none of the container's",
        ),
        (
            yaml.safe_dump({"kind": "Pod", "spec": {"initContainers": [{"name": "once"}], "containers": []}}),
            "init container 'once': only init containers that keep running",
        ),
    ],
)
def test_what_cannot_be_done_here_is_refused(text: str, error: str) -> None:
    with pytest.raises(ManifestError, match=error):
        read_pod(text)
