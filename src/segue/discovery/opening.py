"""Opens the backends that ``--discovery`` and ``--discovery-target`` name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from segue.discovery.base import DiscoveryBackend
from segue.discovery.file import FileDiscovery
from segue.discovery.several import SeveralBackends
from segue.errors import ConfigError
from segue.options import check_url

BackendName = Literal["file", "etcd", "kubernetes"]
BACKENDS: tuple[BackendName, ...] = get_args(BackendName)
NONE = "none"
TTL_S = 10.0  # --discovery-ttl-s


def parse_backends(text: str, name: str) -> list[BackendName]:
    """Returns the backends that an option names, without repetitions; none for "none".

    Raises:
        ConfigError: one is unknown, or is named twice.
    """
    given = [part.strip() for part in text.split(",")]
    if given == [NONE]:
        return []
    found = [each for part in given for each in BACKENDS if each == part]
    if len(found) != len(given) or len(set(found)) != len(found):
        rule = f"expected {NONE}, or some of {', '.join(BACKENDS)}, each once and separated by commas"
        raise ConfigError(f"{name}={text!r}: {rule}", param=name)
    return found


def parse_targets(names: Sequence[BackendName], text: str | None, directory: Path | None) -> list[str]:
    """Returns where each backend is: a directory, a URL or a namespace, in the order of ``--discovery``.

    Args:
        names: of the backends.
        text: the value of ``--discovery-target``; a part that is empty stands for the default.
        directory: the default for files; None: there is none.

    Raises:
        ConfigError: there are more or fewer parts than backends, or one is missing or wrong.
    """
    param, value = "discovery_target", text or ""
    parts = [part.strip() for part in value.split(",")] if value else [""] * len(names)
    if len(parts) != len(names):
        rule = f"expected one per backend of discovery={','.join(names)}, in this order, separated by commas"
        raise ConfigError(f"{param}={text!r}: {rule}", param=param)
    if "file" in names and directory is not None:
        index = names.index("file")
        parts[index] = parts[index] or str(directory)
    for name, part in zip(names, parts, strict=True):
        if name == "file" and not part:
            rule = "name the directory of the files: it is the --failover-dir of the engines"
            raise ConfigError(f"{param}={text!r}: {rule}", param=param)
        if name == "etcd":
            if not part:
                rule = "name the URL of the etcd server, such as http://127.0.0.1:2379"
                raise ConfigError(f"{param}={text!r}: {rule}", param=param)
            check_url(part, param)
    return parts


def open_discovery(
    discovery: str, target: str | None, *, ttl_s: float = TTL_S, directory: Path | None = None
) -> DiscoveryBackend:
    """Open the backends of the options ``--discovery`` and ``--discovery-target``; all of them act as one.

    Args:
        discovery: the backends, separated by commas, or "none".
        target: where each of them is, separated by commas; None: the defaults.
        ttl_s: how long a record of a dead engine stays in etcd or Kubernetes. It never delays a takeover.
        directory: the failover directory, where files are if ``target`` does not say it.

    Raises:
        ConfigError: an option is wrong, or a library is not installed.
        FailoverDirectoryError: the directory for files cannot be used.
    """
    names = parse_backends(discovery, "discovery")
    targets = parse_targets(names, target, directory)
    backends = [_open(name, each, ttl_s) for name, each in zip(names, targets, strict=True)]
    return backends[0] if len(backends) == 1 else SeveralBackends(backends)


def _open(name: BackendName, target: str, ttl_s: float) -> DiscoveryBackend:
    match name:
        case "file":
            return FileDiscovery(Path(target))
        case "etcd":
            from segue.discovery.etcd import EtcdDiscovery  # its library is an extra

            return EtcdDiscovery(target, ttl_s)
        case "kubernetes":
            from segue.discovery.kubernetes import KubernetesDiscovery  # its library is an extra

            return KubernetesDiscovery(target, ttl_s)
