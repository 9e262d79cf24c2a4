"""The input and output of a group of attacks: the server, a count of the attacks, and findings."""

from __future__ import annotations

import asyncio
import gc
import ipaddress
import socket
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import httpx


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A behaviour of the server that is not allowed."""

    what: str  # the attack
    seen: str  # the behaviour that was seen, and the behaviour that is allowed


@dataclass(slots=True, kw_only=True)
class Target:
    """A server on this machine that is attacked, and a count of the attacks."""

    url: str  # http://127.0.0.1:30000, without a path
    model: str  # the name in /v1/models
    pid: int | None = None  # the server's process; None if unknown: then its memory is not checked
    owned: bool = False  # whether the attack started the server, and so may stop and kill its processes
    log: Path | None = None  # the server's log, or None where the attack did not start it
    headers: dict[str, str] = field(default_factory=dict)  # sent with every request: the API key
    tried: Counter[str] = field(default_factory=Counter)  # attack -> how often

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, for a socket."""
        host, port = urlsplit(self.url).hostname, urlsplit(self.url).port
        assert host is not None and port is not None
        return host, port

    def client(self, timeout: float = 60.0) -> httpx.AsyncClient:
        """Returns a client without a bound on connections, and without the proxies of the environment."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
        return httpx.AsyncClient(
            base_url=self.url, headers=self.headers, timeout=timeout, limits=limits, trust_env=False
        )

    def check(self, what: str, status: int, headers: httpx.Headers, body: bytes = b"") -> Finding | None:
        """Count ``what`` as tried; returns a finding if no request may get this answer."""
        self.tried[what] += 1
        if status < 500 or is_documented_refusal(status, headers, body):
            return None
        return Finding(what=what, seen=f"it answered {status}: {body[:200]!r}; no request may get that")


# A group attacks until its budget in seconds is spent, or less long; all its choices come from `Random`.
Group = Callable[[Target, float, Random], list[Finding]]


def run_clients(work: Coroutine[Any, Any, list[Finding]]) -> list[Finding]:
    """Run clients on an event loop of their own.

    A client that is cancelled while it connects leaves an open transport to the garbage collector, which
    warns of it. Such transports are collected here, so that no later test gets the warning.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            return asyncio.run(work)
        finally:
            gc.collect()


def is_documented_refusal(status: int, headers: httpx.Headers, body: bytes) -> bool:
    """Whether a 5xx answer is documented, so that the server may give it."""
    if status == 503:
        return "retry-after" in headers
    return status == 500 and b"non_finite_logits" in body


def loopback_url(url: str) -> str:
    """Returns the URL with its IP address and without a path; raises ValueError unless it is a loopback."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme != "http" or parts.hostname is None:
        raise ValueError(f"{url!r} is not the URL of a server; pass one such as http://127.0.0.1:30000")
    port = parts.port or 30000
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"the host of {url!r} is not known: {error}") from None
    addresses = [ipaddress.ip_address(str(address[0]).partition("%")[0]) for *_, address in found]
    for address in addresses:
        if not address.is_loopback:
            raise ValueError(
                f"{url!r} is {address}, which is not this machine's loopback; the attack tries to break what "
                "it reaches, so it takes addresses such as http://127.0.0.1:30000 only"
            )
    host = str(addresses[0]) if addresses[0].version == 4 else f"[{addresses[0]}]"
    return f"http://{host}:{port}"
