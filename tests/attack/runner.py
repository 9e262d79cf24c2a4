"""Runs groups of attacks against one server and measures the server before and after each group."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import NamedTemporaryFile
from typing import Any

import httpx

from tests.attack import faults, mutations, sockets, stalls, storms
from tests.attack.gauges import MIB, SPARE, Usage, listener, rest, settled, usage
from tests.attack.target import Finding, Group, Target, loopback_url
from tests.attack.watch import HealthProbe, Watch
from tests.e2e.served import serve

GROUPS: dict[str, Group] = {
    "mutations": mutations.run,
    "bodies": stalls.run,
    "sockets": sockets.run,
    "storms": storms.run,
    "faults": faults.run,
}
UNWATCHED = ("faults",)  # groups that start servers of their own
MAX_GROWTH = 200 * MIB  # of the server's resident memory, while one group attacks
WARM_UP_S = 3.0  # of a storm that is not judged, in which pools, caches and the allocator grow to their size
OPTIONS = ("--num-kv-tokens", "2048")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one group."""

    group: str
    tried: int
    probes: Sequence[HealthProbe]
    before: Usage | None  # None: the server's process is not known
    after: Usage | None
    findings: Sequence[Finding]

    @property
    def longest_health_s(self) -> float:
        """Returns the seconds of the slowest probe; 0 if there was none."""
        return max((probe.seconds for probe in self.probes), default=0.0)


@contextmanager
def started() -> Iterator[Target]:
    """A server with the bundled model; it stops when the ``with`` block is left."""
    with NamedTemporaryFile("w") as log, serve(*OPTIONS, log=log.file) as served:
        yield Target(
            url=served.url,
            model=_model(served.url, {}),
            pid=served.process.pid,
            owned=True,
            log=Path(log.name),
        )


def running(url: str, key: str | None) -> Target:
    """Returns the target for a server that runs already.

    Raises:
        ValueError: the server is not on a loopback address.
        httpx.HTTPError: the server does not answer.
    """
    url = loopback_url(url)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    target = Target(url=url, model=_model(url, headers), headers=headers)
    target.pid = listener(target.address[1])
    return target


def run(target: Target, names: Sequence[str], seconds: float, seed: int, health_s: float) -> list[Outcome]:
    """Attack with each of these groups in turn, for ``seconds`` in total.

    ``health_s`` is the longest time that ``/health`` may take. No group may leave anything in the engine.
    """
    storms.run(target, min(WARM_UP_S, seconds / 4), Random(seed))
    at_rest = rest(target)
    budget = seconds / len(names)
    return [_attack(target, name, budget, Random(f"{seed} {name}"), at_rest, health_s) for name in names]


def _attack(
    target: Target, name: str, budget: float, rng: Random, at_rest: dict[str, Any], health_s: float
) -> Outcome:
    before = None if target.pid is None else usage(target.pid)
    tried = target.tried.total()
    num_logged = len(_logged(target))
    probes: Sequence[HealthProbe] = ()
    if name in UNWATCHED:
        findings = GROUPS[name](target, budget, rng)
    else:
        with Watch(target) as watch:
            findings = GROUPS[name](target, budget, rng)
        probes = watch.probes
        findings += left(target, at_rest)
    after = None if before is None else settled(target.pid or os.getpid(), before)
    outcome = Outcome(
        group=name,
        tried=target.tried.total() - tried,
        probes=probes,
        before=before,
        after=after,
        findings=findings,
    )
    findings += slow(probes, health_s) + tracebacks(_logged(target)[num_logged:])
    if before is not None and after is not None:
        findings += grown(name, before, after)
    return outcome


def left(target: Target, at_rest: dict[str, Any]) -> list[Finding]:
    """Returns findings for each field of the engine's state that is not as before."""
    try:
        state = rest(target)
    except httpx.HTTPError as error:
        return [Finding(what="the state afterwards", seen=f"the server does not answer: {error!r}")]
    return [
        Finding(what=f"{name} afterwards", seen=f"{state[name]!r}; it has to be {value!r}, as before")
        for name, value in at_rest.items()
        if state[name] != value
    ]


def slow(probes: Sequence[HealthProbe], health_s: float) -> list[Finding]:
    """Returns findings for answers of ``/health`` that are slow or not 200."""
    found = []
    if (longest := max((probe.seconds for probe in probes), default=0.0)) > health_s:
        seen = f"the longest took {longest:.2f} s; it may take {health_s:g} s"
        found.append(Finding(what="/health", seen=seen))
    if wrong := {probe.status for probe in probes} - {200}:
        found.append(Finding(what="/health", seen=f"status {sorted(wrong)} (0: no answer); it has to be 200"))
    return found


def grown(name: str, before: Usage, after: Usage) -> list[Finding]:
    """Returns findings for memory, files and threads that the server holds in addition."""
    found = []
    if (growth := after.resident - before.resident) > MAX_GROWTH:
        seen = f"{growth / MIB:.0f} MiB more than before; it may be {MAX_GROWTH / MIB:.0f} MiB more"
        found.append(Finding(what=f"memory after {name}", seen=seen))
    for kind, more in (("files", after.files - before.files), ("threads", after.threads - before.threads)):
        if more > SPARE:
            found.append(
                Finding(what=f"{kind} after {name}", seen=f"{more} more than before; it may be {SPARE}")
            )
    return found


def tracebacks(log: str) -> list[Finding]:
    """Returns findings for tracebacks in the log; the server logs expected errors in one line each."""
    found = []
    for each in log.split("Traceback (most recent call last):\n")[1:]:
        error = next((line for line in each.splitlines() if not line.startswith(" ")), "")
        found.append(Finding(what="the log", seen=f"a traceback that ends with {error[:100]!a}"))
    return found


def _logged(target: Target) -> str:
    return "" if target.log is None else target.log.read_text(errors="replace")


def _model(url: str, headers: dict[str, str]) -> str:
    reply = httpx.get(f"{url}/v1/models", headers=headers, timeout=20, trust_env=False).raise_for_status()
    name: str = reply.json()["data"][0]["id"]
    return name
