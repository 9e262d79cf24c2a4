"""Stops, continues and kills processes of a server that has requests in flight; one server per fault."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from random import Random
from typing import Any

import httpx

from tests.attack.gauges import is_alive, processes
from tests.attack.target import Finding, Target
from tests.attack.watch import ask
from tests.e2e.served import Served, greedy, serve

NUM_REQUESTS = 6
TOKENS = 40
PING_S = 1.0  # --ping-s: after this time without an answer of the scheduler's process, /health reports a hang
NOTICE_S = PING_S + 3.0  # time in which /health has to report the fault
GRACE_S = 1.0  # --exit-grace: /health is still answered for this time after the engine's death
OPTIONS = ("--num-kv-tokens", "4096", "--exit-grace", str(GRACE_S), "--ping-s", str(PING_S))
Fault = Callable[["Victim", Random], Iterator[str]]


class Victim:
    """A server with requests in flight."""

    def __init__(self, served: Served, threads: ThreadPoolExecutor) -> None:
        self.served = served
        self.frontend = served.process.pid
        self.worker = served.workers()[0]
        self.replies: list[Future[httpx.Response]] = [threads.submit(self._ask) for _ in range(NUM_REQUESTS)]
        reached(lambda: served.state()["running_batch_size"] > 0, 20)

    def _ask(self) -> httpx.Response:
        body = {"text": "Once upon a time", "sampling_params": greedy(TOKENS)}
        return httpx.post(f"{self.served.url}/generate", json=body, timeout=60, trust_env=False)

    def health(self) -> int:
        """Returns the status of ``/health``; 0 means no answer."""
        host, port = self.served.url.removeprefix("http://").split(":")
        return ask(host, int(port)).status

    def becomes(self, status: int, within_s: float = NOTICE_S) -> bool:
        """Waits until ``/health`` has this status; returns whether it did in time."""
        return reached(lambda: self.health() == status, within_s)

    def ends(self, within_s: float) -> bool:
        """Waits until the server's process ends; returns whether it did in time."""
        try:
            self.served.process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def answered(self, *statuses: int) -> Iterator[str]:
        """Waits for the answers to the requests in flight; yields a text for each with a wrong status."""
        for reply in self.replies:
            try:
                status = reply.result(30).status_code
            except httpx.HTTPError:
                status = 0
            except TimeoutError:
                status = -1
            if status not in statuses:
                allowed = " or ".join(map(_status_text, statuses))
                yield f"a request in flight got {_status_text(status)}; it has to get {allowed}"


def reached(condition: Callable[[], Any], within_s: float) -> bool:
    """Waits until a condition holds; returns whether it did in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _status_text(status: int) -> str:
    return {0: "a closed connection", -1: "no answer"}.get(status, str(status))


def killed_worker(victim: Victim, rng: Random) -> Iterator[str]:
    """Kill the worker: every request has to end, ``/health`` has to be 503, and the server has to end."""
    os.kill(victim.worker, signal.SIGKILL)
    if not victim.becomes(503):
        yield f"/health is {victim.health()} {NOTICE_S:g} s after the worker was killed; it has to be 503"
    yield from victim.answered(0, 200, 500, 503)
    if not victim.ends(GRACE_S + 5):
        yield f"the server still runs {GRACE_S + 5:g} s after its worker was killed"
    elif victim.served.process.returncode != 1:
        yield f"the server ended with exit code {victim.served.process.returncode}; it has to be 1"


def killed_frontend(victim: Victim, rng: Random) -> Iterator[str]:
    """Kill the front end: the worker has to end too."""
    os.kill(victim.frontend, signal.SIGKILL)
    victim.ends(5)
    if not reached(lambda: not is_alive(victim.worker), 5):
        yield "the worker still runs 5 s after the front end was killed"
        os.kill(victim.worker, signal.SIGKILL)
    yield from victim.answered(0, 200)


def stopped_worker(victim: Victim, rng: Random) -> Iterator[str]:
    """Stop the worker: ``/health`` has to report the hang, and recover when the worker continues."""
    os.kill(victim.worker, signal.SIGSTOP)
    try:
        if not victim.becomes(503):
            seen = f"/health is {victim.health()} {NOTICE_S:g} s after the worker was stopped"
            yield f"{seen}; it has to be 503"
    finally:
        os.kill(victim.worker, signal.SIGCONT)
    if not victim.becomes(200):
        yield f"/health is {victim.health()} {NOTICE_S:g} s after the worker continued; it has to be 200"
    yield from victim.answered(200, 503)


def stopped_frontend(victim: Victim, rng: Random) -> Iterator[str]:
    """Stop the front end for a while: every request has to succeed, only later."""
    os.kill(victim.frontend, signal.SIGSTOP)
    time.sleep(rng.uniform(0.2, 1.5))  # the fault itself, not waiting for a condition
    os.kill(victim.frontend, signal.SIGCONT)
    yield from victim.answered(200)


def stuttering_worker(victim: Victim, rng: Random) -> Iterator[str]:
    """Stop and continue the worker at random: every request has to succeed, only later."""
    until = time.monotonic() + 3
    while time.monotonic() < until:
        os.kill(victim.worker, signal.SIGSTOP)
        time.sleep(rng.uniform(0, PING_S / 4))
        os.kill(victim.worker, signal.SIGCONT)
        time.sleep(rng.uniform(0, 0.05))
    yield from victim.answered(200)


FAULTS: tuple[Fault, ...] = (
    killed_worker,
    stopped_worker,
    stopped_frontend,
    stuttering_worker,
    killed_frontend,
)


def run(target: Target, budget_s: float, rng: Random) -> list[Finding]:
    """Run the faults in order, beginning at a random one, until the budget is spent; at least one."""
    if not target.owned:  # a server that this attack did not start is left alone
        return []
    findings, until, first = [], time.monotonic() + budget_s, rng.randrange(len(FAULTS))
    for fault in FAULTS[first:] + FAULTS[:first]:
        with _victim() as victim:
            target.tried[f"faults: {fault.__name__}"] += 1
            findings += [Finding(what=f"faults: {fault.__name__}", seen=seen) for seen in fault(victim, rng)]
        if time.monotonic() > until:
            break
    return findings


@contextmanager
def _victim() -> Iterator[Victim]:
    with ThreadPoolExecutor(NUM_REQUESTS) as threads, serve(*OPTIONS) as served:
        pids = list(processes(served.process.pid))
        try:
            yield Victim(served, threads)
        finally:
            for pid in pids:
                if is_alive(pid):
                    os.kill(pid, signal.SIGCONT)
