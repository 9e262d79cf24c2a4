"""Reads the manifest of a failover pod: its containers and their probes, as Kubernetes understands them.

The file is that of ``deploy/kubernetes/``, which is also part of the package: a machine without Kubernetes
watches its engines by the same probes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.resources import files
from typing import Any, Literal, get_args

import yaml

from segue.errors import ManifestError

MANIFEST = "failover-pod.yaml"


Scheme = Literal["HTTP", "HTTPS"]


class ProbeKind(Enum):
    """What a probe decides; the value is its field in a manifest."""

    STARTUP = "startupProbe"  # the other probes wait for it, and a container that never starts is killed
    LIVENESS = "livenessProbe"  # a container that fails it is killed
    READINESS = "readinessProbe"  # a container that fails it gets no requests


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpGet:
    """A GET that succeeds if the answer's status is 200 to 399."""

    path: str
    port: int | str  # a number, or the name of one of the container's ports
    scheme: Scheme = "HTTP"  # HTTPS: whatever the certificate is


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """A command that succeeds if its exit code is 0."""

    command: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One probe of a container. The defaults are those of Kubernetes."""

    action: HttpGet | Execution
    initial_delay_s: float = 0.0
    period_s: float = 10.0
    timeout_s: float = 1.0
    success_threshold: int = 1  # successes in a row that change the result
    failure_threshold: int = 3  # failures in a row that change the result


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """One container of a pod."""

    name: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]  # without those that secrets set
    ports: Mapping[str, int]  # by their names
    probes: Mapping[ProbeKind, Probe]
    is_sidecar: bool = False  # it starts before the others, and runs as long as they do


def bundled_manifest() -> str:
    """Return the text of the manifest that comes with the package."""
    return (files("segue.failover") / MANIFEST).read_text()


def read_pod(text: str) -> dict[str, Container]:
    """Return the containers of a manifest of a Pod or a Deployment, by name and in the order of their start.

    Raises:
        ManifestError: it is no such manifest, or a probe is of a kind other than httpGet and exec.
    """
    try:
        manifest = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ManifestError(f"the manifest is no YAML: {error}") from error
    kind = manifest.get("kind") if isinstance(manifest, dict) else None
    if kind not in ("Pod", "Deployment"):
        raise ManifestError(f"the manifest's kind is {kind!r}; give that of a Pod or a Deployment")
    spec = manifest["spec"]["template"]["spec"] if kind == "Deployment" else manifest["spec"]
    sidecars = [_container(each, is_sidecar=True) for each in spec.get("initContainers", ())]
    found = [*sidecars, *(_container(each) for each in spec["containers"])]
    return {container.name: container for container in found}


def _container(given: Mapping[str, Any], *, is_sidecar: bool = False) -> Container:
    name = given["name"]
    if is_sidecar and given.get("restartPolicy") != "Always":
        text = "only init containers that keep running, with restartPolicy Always, are understood"
        raise ManifestError(f"init container {name!r}: {text}")
    ports: Sequence[Mapping[str, Any]] = given.get("ports", ())
    probes = {kind: _probe(given[kind.value], name, kind) for kind in ProbeKind if kind.value in given}
    for kind, probe in probes.items():
        named = probe.action.port if isinstance(probe.action, HttpGet) else None
        if isinstance(named, str) and named not in {port.get("name") for port in ports}:
            text = f"its port {named!r} is none of the container's"
            raise ManifestError(f"container {name!r}, {kind.value}: {text}")
    return Container(
        name=name,
        arguments=tuple(given.get("args", ())),
        environment={each["name"]: each["value"] for each in given.get("env", ()) if "value" in each},
        ports={port["name"]: port["containerPort"] for port in ports},
        probes=probes,
        is_sidecar=is_sidecar,
    )


# Fields of a probe that say nothing to this machine: a container is always killed at once.
_IGNORED = {"terminationGracePeriodSeconds"}
_TIMES = {
    "initialDelaySeconds": "initial_delay_s",
    "periodSeconds": "period_s",
    "timeoutSeconds": "timeout_s",
    "successThreshold": "success_threshold",
    "failureThreshold": "failure_threshold",
}


def _probe(given: Mapping[str, Any], container: str, kind: ProbeKind) -> Probe:
    where = f"container {container!r}, {kind.value}"
    actions = given.keys() - _TIMES.keys() - _IGNORED
    if actions == {"httpGet"}:
        action: HttpGet | Execution = _http_get(given["httpGet"], where)
    elif actions == {"exec"}:
        action = Execution(command=tuple(given["exec"]["command"]))
    else:
        named = ", ".join(sorted(actions)) or "nothing"
        raise ManifestError(f"{where} has {named}; exactly one of httpGet and exec is understood")
    return Probe(action=action, **{ours: given[name] for name, ours in _TIMES.items() if name in given})


def _http_get(given: Mapping[str, Any], where: str) -> HttpGet:
    if others := given.keys() - {"path", "port", "scheme"}:
        named = ", ".join(sorted(others))
        raise ManifestError(f"{where}: httpGet has {named}; path, port and scheme alone are understood")
    if (scheme := given.get("scheme", "HTTP")) not in get_args(Scheme):
        raise ManifestError(f"{where}: httpGet's scheme is {scheme!r}; give HTTP or HTTPS")
    return HttpGet(path=given.get("path", "/"), port=given["port"], scheme=scheme)
