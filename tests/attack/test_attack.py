"""The attack reports faults of a broken server, none of this server, and attacks no other machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random

import httpx
import pytest

from tests.attack import mutations, runner, storms
from tests.attack.__main__ import main
from tests.attack.gauges import MIB, SPARE, Usage, listener
from tests.attack.target import Finding, Target, is_documented_refusal, loopback_url
from tests.attack.watch import HealthProbe, Watch

USAGE = Usage(resident=500 * MIB, files=40, threads=16)


def test_the_attack_finds_nothing_wrong_with_this_server(capsys: pytest.CaptureFixture[str]) -> None:
    # The other groups have tests of their own, with bounds that cannot hold while other tests run.
    groups = ["--group", "mutations", "--group", "storms"]
    # The bound of 2 s allows for other work of the machine.
    found = main(["--seconds", "3", "--seed", "1", "--health-s", "2", *groups])
    assert found == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.8.9.10:80/v1", "http://127.8.9.10:80"),
        ("http://[::1]:5000", "http://[::1]:5000"),
        ("http://127.0.0.1", "http://127.0.0.1:30000"),
    ],
)
def test_loopback_addresses_are_accepted(url: str, expected: str) -> None:
    assert loopback_url(url) == expected


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://192.0.2.1:30000", "is 192.0.2.1, which is not this machine's loopback"),
        ("http://0.0.0.0:30000", "is 0.0.0.0"),
        ("http://[2001:db8::1]:30000", "is 2001:db8::1"),
        ("http://127.0.0.1@192.0.2.1:30000", "is 192.0.2.1"),
        ("http://[::ffff:192.0.2.1]:30000", "not this machine's loopback"),
        ("https://127.0.0.1:30000", "is not the URL of a server"),
        ("ftp://127.0.0.1", "is not the URL of a server"),
    ],
)
def test_addresses_of_other_machines_are_refused(
    url: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=r"loopback|URL") as error:
        loopback_url(url)
    assert words in str(error.value)
    assert main([url]) == 2
    assert words in capsys.readouterr().err


def test_a_host_name_with_one_address_of_another_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [(2, 1, 6, "", ("127.0.0.1", 80)), (2, 1, 6, "", ("192.0.2.1", 80))]
    monkeypatch.setattr("tests.attack.target.socket.getaddrinfo", lambda *_, **__: answers)
    with pytest.raises(ValueError, match=r"is 192\.0\.2\.1"):
        loopback_url("http://both.example:80")


@pytest.mark.parametrize(
    ("status", "headers", "body", "documented"),
    [
        (503, {"retry-after": "1"}, b"", True),
        (503, {}, b"", False),
        (500, {}, b'{"error": {"code": "non_finite_logits"}}', True),
        (500, {}, b"Internal Server Error", False),
        (502, {"retry-after": "1"}, b"", False),
    ],
)
def test_a_5xx_is_a_finding_unless_it_is_documented(
    status: int, headers: dict[str, str], body: bytes, documented: bool
) -> None:
    assert is_documented_refusal(status, httpx.Headers(headers), body) == documented
    target = Target(url="http://127.0.0.1:1", model="m")
    assert (target.check("x", status, httpx.Headers(headers), body) is None) == documented
    assert target.check("x", 404, httpx.Headers(), b"") is None
    assert target.tried["x"] == 2


class BrokenHandler(BaseHTTPRequestHandler):
    """Answers each POST with 500 and takes long for ``/health``."""

    def do_GET(self) -> None:
        time.sleep(0.3)  # the fault
        self._answer(200)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"] or 0))
        self._answer(500)

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class PatientServer(ThreadingHTTPServer):
    """A server that refuses no connection of a storm."""

    request_queue_size = 512


@contextmanager
def broken() -> Iterator[Target]:
    server = PatientServer(("127.0.0.1", 0), BrokenHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield Target(url=f"http://127.0.0.1:{server.server_port}", model="m")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("group", [mutations.run, storms.run])
def test_answers_of_500_are_found(group: runner.Group) -> None:
    # A busy machine may let half a second pass before the first request.
    deadline, findings = time.monotonic() + 60, []
    with broken() as target:
        while not findings and time.monotonic() < deadline:
            findings = group(target, 0.5, Random(1))
    assert findings and all("answered 500" in finding.seen for finding in findings)


def test_a_slow_health_is_found() -> None:
    with broken() as target, Watch(target) as watch:
        deadline = time.monotonic() + 10
        while len(watch.probes) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert [probe.status for probe in watch.probes[:2]] == [200, 200]
    found = runner.slow(watch.probes, 0.2)
    assert len(found) == 1 and "it may take 0.2 s" in found[0].seen
    assert runner.slow(watch.probes, 5.0) == []


def test_a_health_that_is_not_200_is_found() -> None:
    found = runner.slow([HealthProbe(0.01, 200), HealthProbe(0.01, 503), HealthProbe(0.01, 0)], 1.0)
    assert [finding.seen for finding in found] == ["status [0, 503] (0: no answer); it has to be 200"]


@pytest.mark.parametrize(
    ("after", "what"),
    [
        (USAGE, []),
        (Usage(resident=699 * MIB, files=40 + SPARE, threads=16 + SPARE), []),
        (Usage(resident=701 * MIB, files=40, threads=16), ["memory after storms"]),
        (Usage(resident=500 * MIB, files=41 + SPARE, threads=16), ["files after storms"]),
        (Usage(resident=500 * MIB, files=40, threads=17 + SPARE), ["threads after storms"]),
    ],
)
def test_a_leak_is_found(after: Usage, what: list[str]) -> None:
    assert [finding.what for finding in runner.grown("storms", USAGE, after)] == what


def test_a_traceback_in_the_log_is_found() -> None:
    log = (
        "WARNING all is well\nTraceback (most recent call last):\n  File x\nOSError: no\nWARNING well again\n"
    )
    assert [finding.seen for finding in runner.tracebacks(log)] == [
        "a traceback that ends with 'OSError: no'"
    ]
    assert runner.tracebacks("WARNING all is well\n") == []


def test_requests_left_in_the_engine_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "rest", lambda target: {"req_to_token_pool_used": 1, "tree_cache_size": 0})
    at_rest = {"req_to_token_pool_used": 0, "tree_cache_size": 0}
    found = runner.left(Target(url="http://127.0.0.1:1", model="m"), at_rest)
    seen = "1; it has to be 0, as before"
    assert found == [Finding(what="req_to_token_pool_used afterwards", seen=seen)]


def test_a_seed_draws_the_same_bodies() -> None:
    bodies = [[mutations.mutated(b'{"a": [1, 2]}', Random(seed)) for _ in range(5)] for seed in (1, 1, 2)]
    assert bodies[0] == bodies[1] != bodies[2]


def test_the_process_that_listens_is_found() -> None:
    with broken() as target:
        with open("/proc/self/stat") as file:
            own = int(file.read().split()[0])
        assert listener(target.address[1]) == own
