"""Engines that stand by: what wakes them, what ends them, and what nobody may ever see of them."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from segue.discovery.opening import open_discovery
from segue.failover.lock import CohortLock
from tests.conftest import least_measured
from tests.launch.test_processes import is_alive
from tests.support.shadows import ShadowProcess, wait_until

DEADLINE_S = 1.0
GONE_S = DEADLINE_S + 1.0  # from the call to the end of the frontend and all ranks
SEEN_S = 5.0  # from the end of a parked engine's rank to the probe that says so
PROBES = ("startup", "live", "ready", "health")
MANUAL = {"wake": "manual", "wake_timeout_s": DEADLINE_S, "tp": 2}
SLEEP, HOLD_GIL = "import time; time.sleep(600)", "import ctypes; ctypes.PyDLL(None).sleep(600)"


@pytest.fixture
def cohort(tmp_path: Path) -> Path:
    directory = tmp_path / "cohort"
    directory.mkdir(mode=0o700)
    return directory


def epoch_in(directory: Path) -> int:
    note = CohortLock(directory, "default").note()
    return 0 if note is None else note.epoch


def recorded_in(directory: Path) -> list[str]:
    """The engines that routers can find."""

    async def found() -> list[str]:
        backend = open_discovery("file", None, directory=directory)
        try:
            return [record.engine for record in await backend.list()]
        finally:
            await backend.close()

    return asyncio.run(found())


class RegistrationLog:
    """A router that notes who registers at it. It ends with the ``with`` block."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> RegistrationLog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def test_a_shadow_wakes_when_the_active_engine_is_killed(tiny_model: Path, cohort: Path) -> None:
    with ShadowProcess(tiny_model, cohort, "a", tp=2) as first:
        first.until("active")
        assert first.probe("health")[1]["epoch"] == 1
        expected = first.generate()
        with ShadowProcess(tiny_model, cohort, "b", tp=2) as second:
            second.until("standby")
            assert [second.probe(name)[0] for name in PROBES] == [
                200,
                200,
                503,
                503,
            ]
            assert not second.listens()
            assert recorded_in(cohort) == ["a"], "routers cannot find an engine that stands by"
            began = time.monotonic()
            first.process.kill()  # the frontend: the kernel kills its workers
            wait_until(second.listens, "the takeover")
            print(f"front killed -> the next engine answers: {time.monotonic() - began:.3f} s")
            second.until("active")
            assert second.generate() == expected
            assert second.probe("ready")[0] == second.probe("live")[0] == second.probe("health")[0] == 200
            assert second.probe("health")[1]["epoch"] == epoch_in(cohort) == 2
            assert recorded_in(cohort) == ["b"]
            with ShadowProcess(tiny_model, cohort, "c", tp=2) as third:
                third.until("standby")
                doomed, began = second.workers(), time.monotonic()
                os.kill(doomed[-1], signal.SIGKILL)  # one rank: the engine takes the others down with it
                wait_until(third.listens, "the takeover")
                print(f"rank killed -> the next engine answers: {time.monotonic() - began:.3f} s")
                assert not any(map(is_alive, doomed)), "the lock is free only once no rank runs"
                third.until("active")
                assert third.generate() == expected
                assert "segue:failovers_total{" in third.system.get("/metrics").text
                assert second.process.wait(60) == 1


def test_by_hand_a_shadow_wakes_only_once_the_lock_is_free(tiny_model: Path, cohort: Path) -> None:
    with (
        ShadowProcess(tiny_model, cohort, "a", wake="manual") as first,
        ShadowProcess(tiny_model, cohort, "b", wake="manual") as second,
    ):
        first.until("standby")
        second.until("standby")
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: first.system.post("/engine/wake_up"), range(4)))
        assert [answer.status_code for answer in answers] == [200] * 4
        assert {answer.json()["epoch"] for answer in answers} == {1}, "all callers share one wake"
        assert answers[0].json()["state"] == "active"
        assert {"claim", "memory", "canary", "serve", "total"} == answers[0].json()["timings"].keys()
        refused = second.system.post("/engine/wake_up")
        assert (refused.status_code, refused.json()["error_code"]) == (423, "lock_held")
        assert f"engine a (process {first.process.pid}, epoch 1, {first.url})" in refused.text
        assert second.state == "standby"
        first.process.kill()
        wait_until(lambda: second.system.post("/engine/wake_up").status_code == 200, "the wake")
        assert second.state == "active"
        second.generate()


def test_a_shadow_that_waits_for_the_lock_is_not_woken_by_hand(tiny_model: Path, cohort: Path) -> None:
    lock = CohortLock(cohort, "default")
    assert lock.try_acquire()
    with ShadowProcess(tiny_model, cohort, "a", wake="lock") as shadow:
        shadow.until("standby")
        refused = shadow.system.post("/engine/wake_up")
        assert (refused.status_code, "--wake lock" in refused.text) == (403, True)
        shadow.process.send_signal(signal.SIGTERM)
        assert shadow.process.wait(60) == 0
    with (
        RegistrationLog() as router,
        ShadowProcess(tiny_model, cohort, "a", wake="lock", register=router.url) as shadow,
    ):
        shadow.until("standby")
        assert router.bodies == []
        lock.release()
        shadow.until("active")
        wait_until(lambda: router.bodies, "its registration")
        assert (router.bodies[0]["url"], router.bodies[0]["epoch"]) == (shadow.url, 1)


class Watcher:
    """Looks again and again whether a port is open, until it is stopped."""

    def __init__(self, port: int) -> None:
        self.num_seen = 0
        self._port = port
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.01):
            with socket.socket() as probe:
                self.num_seen += probe.connect_ex(("127.0.0.1", self._port)) == 0


def seconds_of_wake(shadow: ShadowProcess, what: str) -> float:
    """Wake an engine that will hang, and check that it ends, with its ranks, and never listens.

    Returns the seconds from the call to the end of all its processes.
    """
    shadow.until("standby")
    workers, watcher = shadow.workers(), Watcher(shadow.port)
    try:
        assert len(workers) == 2
        began = time.monotonic()
        with pytest.raises(httpx.TransportError):
            shadow.system.post("/engine/wake_up")
        code = shadow.process.wait(DEADLINE_S + 60)
        wait_until(lambda: not any(map(is_alive, workers)), "the end of the ranks")
        seconds = time.monotonic() - began
    finally:
        watcher.stop()
    print(f"{what}: gone after {seconds:.2f} s; the deadline is {DEADLINE_S:g} s")
    assert seconds >= DEADLINE_S
    assert code == 1 and watcher.num_seen == 0
    return seconds


def check_gone_in_time(engines: dict[str, ShadowProcess], start: Callable[[str], ShadowProcess]) -> None:
    """Wake engines that will hang, by what hangs; ``start`` starts one again, which another try needs."""
    for what, first in engines.items():
        shadows = itertools.chain([first], map(start, itertools.repeat(what)))
        measure = partial(lambda shadows, what: seconds_of_wake(next(shadows), what), shadows, what)
        assert least_measured(GONE_S, measure) < GONE_S, what


@pytest.fixture
def engines() -> Iterator[ExitStack]:
    """What ends the engines that a test starts side by side."""
    with ExitStack() as stack:
        yield stack


def test_a_wake_that_hangs_ends_the_engine_in_time(
    tiny_model: Path, tmp_path: Path, engines: ExitStack
) -> None:
    router, ranks = engines.enter_context(RegistrationLog()), {"sleep": 0, "gil": 0, "stop": 1}

    def start(how: str) -> ShadowProcess:
        environment = {"FAKE_WAKE": how, "FAKE_WAKE_RANK": str(ranks[how])}
        shadow = ShadowProcess(tiny_model, tmp_path / how, "a", environment, register=router.url, **MANUAL)
        return engines.enter_context(shadow)

    check_gone_in_time({how: start(how) for how in ranks}, start)
    lock = CohortLock(tmp_path / "gil", "default")
    assert lock.try_acquire(), "the next engine can have the lock"
    lock.release()
    assert [recorded_in(tmp_path / how) for how in ranks] == [[]] * 3
    assert router.bodies == []


HANGS = """
import asyncio, sys, tests.server.fake_server as program
from segue.server import canary
async def hang(runtime, directory):
    {how}
canary.check = hang
sys.exit(program.main())
"""


def test_a_frontend_that_hangs_in_a_wake_ends_with_its_ranks(
    tiny_model: Path, tmp_path: Path, engines: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, hangs = engines.enter_context(RegistrationLog()), {"sleep": SLEEP, "gil": HOLD_GIL}

    def start(how: str) -> ShadowProcess:
        program = tmp_path / f"{how}.py"
        program.write_text(HANGS.format(how=hangs[how]))
        monkeypatch.setattr("tests.support.shadows.PROGRAM", str(program))
        shadow = ShadowProcess(tiny_model, tmp_path / how, "a", register=router.url, **MANUAL)
        return engines.enter_context(shadow)

    check_gone_in_time({how: start(how) for how in hangs}, start)
    assert router.bodies == []


def test_a_wake_that_fails_leaves_the_lock_to_the_next_engine(
    tiny_model: Path, cohort: Path, engines: ExitStack
) -> None:
    failing = {"FAKE_WAKE": "fail"}, {"FAKE_TOKEN": "1"}
    first = engines.enter_context(ShadowProcess(tiny_model, cohort, "a", deterministic=True))
    first.until("active")
    second, third = (
        engines.enter_context(ShadowProcess(tiny_model, cohort, name, environment, deterministic=True))
        for name, environment in zip("bc", failing, strict=True)
    )
    second.until("standby")
    third.until("standby")
    first.process.kill()
    texts = []
    for each in (second, third):
        assert each.process.wait(60) == 1 and each.process.stdout is not None
        texts.append(each.process.stdout.read())
    assert texts[0].startswith("failed rank 0 cannot wake: MemoryError: no pages are left")
    assert texts[1].startswith("failed the test request gave") and "every bit counts" in texts[1]
    with ShadowProcess(tiny_model, cohort, "d", deterministic=True) as last:
        last.until("active")
        assert last.probe("health")[1]["epoch"] == 4, "those that failed had claimed epochs"


def test_a_parked_shadow_that_dies_is_seen(tiny_model: Path, cohort: Path) -> None:
    assert least_measured(SEEN_S, lambda: seconds_until_seen(tiny_model, cohort)) < SEEN_S


def seconds_until_seen(tiny_model: Path, cohort: Path) -> float:
    """Kill a rank of an engine that stands by; returns the seconds until `/live` says so."""
    with ShadowProcess(tiny_model, cohort, "a", wake="manual", tp=2, exit_grace=20.0) as shadow:
        shadow.until("standby")
        began = time.monotonic()
        os.kill(shadow.workers()[1], signal.SIGKILL)
        wait_until(lambda: shadow.probe("live")[0] == 503, "the 503 of /live")
        seconds = time.monotonic() - began
        print(f"killed rank seen after {seconds:.3f} s")
        assert not shadow.listens()
        return seconds


@pytest.mark.slow
def test_a_parked_shadow_that_is_stopped_is_seen(tiny_model: Path, cohort: Path) -> None:
    with ShadowProcess(tiny_model, cohort, "a", wake="manual", tp=2) as shadow:
        shadow.until("standby")
        rank = shadow.workers()[1]
        began = time.monotonic()
        os.kill(rank, signal.SIGSTOP)
        wait_until(lambda: shadow.probe("live")[0] == 503, "the 503 of /live")
        seconds = time.monotonic() - began
        print(f"stopped rank seen after {seconds:.3f} s")
        assert seconds < SEEN_S + 1.0
        assert "a worker rank has not answered for" in shadow.probe("live")[1]["message"]
        os.kill(rank, signal.SIGCONT)
        wait_until(lambda: shadow.probe("live")[0] == 200, "its recovery")


def test_a_pause_is_taken_over(tiny_model: Path, cohort: Path) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(ShadowProcess(tiny_model, cohort, "a"))
        first.until("active")
        second = stack.enter_context(ShadowProcess(tiny_model, cohort, "b"))
        second.until("standby")

        def ask(engine: ShadowProcess, path: str, **body: object) -> httpx.Response:
            response = httpx.post(engine.url + path, json=body, timeout=30)
            assert response.status_code == 200, response.text
            return response

        def is_paused(engine: ShadowProcess) -> bool:
            return bool(httpx.get(f"{engine.url}/is_paused", timeout=30).json()["is_paused"])

        ask(first, "/pause_generation", mode="in_place", ttl_s=3600)
        first.process.kill()
        second.until("active")
        assert is_paused(second)
        with ShadowProcess(tiny_model, cohort, "c") as third:
            third.until("standby")
            ask(second, "/continue_generation")
            assert not is_paused(second) and second.generate()
            second.process.kill()
            third.until("active")
            assert not is_paused(third) and third.generate()
            ask(third, "/pause")
            third.process.send_signal(signal.SIGTERM)
            assert third.process.wait(60) == 0
            assert not list(cohort.glob("control-*")), "none takes over from it"


def test_an_engine_that_loses_its_lock_ends_at_once(tiny_model: Path, cohort: Path) -> None:
    with ShadowProcess(tiny_model, cohort, "a", exit_grace=30.0) as first:
        first.until("active")
        (cohort / "default.lock").unlink()
        with ShadowProcess(tiny_model, cohort, "b") as second:
            assert first.process.wait(60) == 1
            second.until("active")
