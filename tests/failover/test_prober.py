"""Probes as the kubelet runs them, with a clock that the tests set, and against real sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

import pytest

from segue.failover.pod import Execution, HttpGet, Probe, ProbeKind
from segue.failover.prober import Prober, ask, keep_probing

STARTUP, LIVENESS, READINESS = ProbeKind
LIVE = Probe(action=HttpGet(path="/live", port="system"), period_s=5, timeout_s=2)
START = Probe(action=HttpGet(path="/startup", port="system"), period_s=10, failure_threshold=4)
READY = Probe(action=HttpGet(path="/ready", port="system"), period_s=1, success_threshold=2)
ALL = {STARTUP: START, LIVENESS: LIVE, READINESS: READY}


def due(prober: Prober, now: float) -> set[ProbeKind]:
    return {kind for kind, _ in prober.take_due(now)}


def test_the_other_probes_wait_for_the_startup_probe() -> None:
    prober = Prober(ALL, 0.0)
    assert due(prober, 0.0) == {STARTUP} and not prober.has_started
    prober.answered(STARTUP, "HTTP status 503", 0.0, 0.1)
    assert due(prober, 9.9) == set() and prober.wake_at == 10.0
    assert due(prober, 10.0) == {STARTUP}
    prober.answered(STARTUP, None, 10.0, 10.1)
    assert prober.has_started and not prober.is_ready
    assert due(prober, 10.1) == {LIVENESS, READINESS}
    assert prober.wake_at is None, "a probe does not run beside itself, and the startup probe has ended"


def test_without_a_startup_probe_the_others_begin_at_once() -> None:
    prober = Prober({LIVENESS: LIVE}, 3.0)
    assert prober.has_started and prober.is_ready and due(prober, 3.0) == {LIVENESS}


def test_a_container_that_never_starts_is_killed() -> None:
    prober = Prober(ALL, 0.0)
    for number in range(4):
        assert prober.verdict is None
        now = number * 10.0
        assert due(prober, now) == {STARTUP}
        prober.answered(STARTUP, "HTTP status 503", now, now)
    assert prober.verdict == "its startupProbe failed 4 times in a row (HTTP status 503)"


def test_only_failures_in_a_row_kill() -> None:
    prober = Prober({LIVENESS: LIVE}, 0.0)
    for now, failure in enumerate(["a", "b", None, "c", "d"]):
        prober.answered(LIVENESS, failure, now, now)
    assert prober.verdict is None
    prober.answered(LIVENESS, "e", 5, 5)
    assert prober.verdict == "its livenessProbe failed 3 times in a row (e)"


def test_readiness_has_thresholds_and_never_kills() -> None:
    prober = Prober({READINESS: READY}, 0.0)
    found = []
    for now, failure in enumerate([None, None, "a", "b", None, "c", "d", "e", None, None]):
        prober.answered(READINESS, failure, now, now)
        found.append(prober.is_ready)
    assert found == [False, True, True, True, True, True, True, False, False, True]
    assert prober.verdict is None


def test_a_probe_that_takes_longer_than_its_period_runs_again_at_once() -> None:
    prober = Prober({LIVENESS: LIVE}, 0.0)
    assert due(prober, 0.0) == {LIVENESS} and due(prober, 6.0) == set()
    prober.answered(LIVENESS, "no answer within 2 s", 0.0, 7.0)
    assert due(prober, 7.0) == {LIVENESS}


def test_initial_delays_count_from_the_start_of_the_process() -> None:
    late = Probe(action=LIVE.action, initial_delay_s=30)
    prober = Prober({STARTUP: START, LIVENESS: late}, 100.0)
    prober.take_due(100.0)
    prober.answered(STARTUP, None, 100.0, 101.0)
    assert prober.wake_at == 130.0


# --- real sockets ---


async def no_command(command: tuple[str, ...]) -> str | None:
    raise AssertionError(command)


@asynccontextmanager
async def serving(reply: Callable[[bytes], bytes | None], host: str = "127.0.0.1") -> AsyncIterator[int]:
    """A server that answers each request so; None: it is silent. Gives its port, and ends all connections."""
    ended = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.append(done := asyncio.Event())
        try:
            answer = reply(await reader.readuntil(b"\r\n\r\n"))
            if answer is None:
                await reader.read()
            else:
                writer.write(answer)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            done.set()

    async with await asyncio.start_server(serve, host, 0) as server:
        yield server.sockets[0].getsockname()[1]
        for each in ended:
            await asyncio.wait_for(each.wait(), 60)


async def asked(answer: bytes | None, timeout_s: float = 10.0) -> tuple[str | None, bytes]:
    """The result of a probe of a server that answers like this, and the request; None: it is silent."""
    requests = []
    async with serving(lambda request: requests.append(request) or answer) as port:
        probe = Probe(action=HttpGet(path="/live", port="system"), timeout_s=timeout_s)
        return await ask(probe, {"system": port}, no_command), b"".join(requests)


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n{}", None),
        (b"HTTP/1.1 302 Found\r\n\r\n", None),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "HTTP status 404"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "HTTP status 503"),
        (b"nonsense", "the answer is not HTTP"),
        (b"", "the answer is not HTTP"),
    ],
)
def test_the_status_decides(answer: bytes, failure: str | None) -> None:
    found, request = asyncio.run(asked(answer))
    assert found == failure and request.startswith(b"GET /live HTTP/1.1\r\nHost: 127.0.0.1:")


def test_a_container_that_listens_on_another_address_is_asked_there() -> None:
    async def test(host: str) -> tuple[str | None, list[bytes]]:
        requests: list[bytes] = []
        answer = b"HTTP/1.1 200 OK\r\n\r\n"
        async with serving(lambda request: requests.append(request) or answer, "127.0.0.2") as port:
            probe = Probe(action=HttpGet(path="/live", port=port), timeout_s=10)
            return await ask(probe, {}, no_command, host=host), requests

    assert "Connect call failed" in str(asyncio.run(test("127.0.0.1"))[0])
    failure, requests = asyncio.run(test("127.0.0.2"))
    assert failure is None and b"\r\nHost: 127.0.0.1:" in requests[0], "no server refuses this host"


def test_silence_fails() -> None:
    assert asyncio.run(asked(None, timeout_s=0.05))[0] == "no answer within 0.05 s"


def test_nobody_listening_fails() -> None:
    probe = Probe(action=HttpGet(path="/live", port=9))
    assert asyncio.run(ask(probe, {}, no_command)) == "Connect call failed ('127.0.0.1', 9)"


def test_a_command_decides_by_itself_and_has_a_time() -> None:
    async def execute(command: tuple[str, ...]) -> str | None:
        if command == ("hang",):
            await asyncio.sleep(600)
        return None if command == ("true",) else "exit code 1"

    def found(*command: str) -> str | None:
        return asyncio.run(ask(Probe(action=Execution(command=command), timeout_s=0.2), {}, execute))

    assert (found("true"), found("false")) == (None, "exit code 1")
    assert found("hang") == "no answer within 0.2 s"


def test_probes_run_until_a_process_must_be_killed() -> None:
    async def test() -> tuple[str, Mapping[str, int]]:
        paths: dict[str, int] = {}

        def reply(request: bytes) -> bytes:
            path = request.split()[1].decode()
            paths[path] = paths.get(path, 0) + 1
            fails = (path == "/startup" and paths[path] < 3) or (path == "/live" and paths[path] > 2)
            return b"HTTP/1.1 %d X\r\n\r\n" % (503 if fails else 200)

        probes = {
            kind: Probe(action=HttpGet(path=path, port="system"), period_s=0.01, timeout_s=10.0)
            for kind, path in zip(ProbeKind, ("/startup", "/live", "/ready"), strict=True)
        }
        async with serving(reply) as port:
            prober = Prober(probes, time.monotonic())
            return await asyncio.wait_for(keep_probing(prober, {"system": port}, no_command), 60), paths

    verdict, paths = asyncio.run(test())
    assert verdict == "its livenessProbe failed 3 times in a row (HTTP status 503)"
    assert paths["/startup"] == 3 and paths["/live"] == 5 and paths["/ready"] >= 1
