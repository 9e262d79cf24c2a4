"""Engines that stand by: what wakes them, what ends them, and what nobody may ever see of them."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest

from segue.failover.lock import CohortLock
from tests.launch.test_processes import is_alive
from tests.support.shadows import ShadowProcess, wait_until

DEADLINE_S = 1.0
RUNNING = re.compile(r"num_requests_running\{[^}]*\} 1\.0")
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


def test_a_shadow_wakes_when_the_active_engine_is_killed(tiny_model: Path, cohort: Path) -> None:
    with ShadowProcess(tiny_model, cohort, "a", tp=2) as first:
        first.until("active")
        assert first.probe("health")[1]["epoch"] == 1
        expected = first.generate()
        with ShadowProcess(tiny_model, cohort, "b", tp=2) as second:
            second.until("standby")
            assert [second.probe(name)[0] for name in ("startup", "live", "ready", "health")] == [
                200,
                200,
                503,
                503,
            ]
            assert not second.listens()
            began = time.monotonic()
            first.process.kill()  # the frontend: the kernel kills its workers
            wait_until(second.listens, "the takeover")
            print(f"front killed -> the next engine answers: {time.monotonic() - began:.3f} s")
            second.until("active")
            assert second.generate() == expected
            assert second.probe("ready")[0] == second.probe("live")[0] == second.probe("health")[0] == 200
            assert second.probe("health")[1]["epoch"] == epoch_in(cohort) == 2
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
                assert second.process.wait(10) == 1


def test_by_hand_a_shadow_wakes_only_once_the_lock_is_free(tiny_model: Path, cohort: Path) -> None:
    with (
        ShadowProcess(tiny_model, cohort, "a", wake="manual") as first,
        ShadowProcess(tiny_model, cohort, "b", wake="manual") as second,
    ):
        first.until("standby")
        second.until("standby")
        answers = []
        calls = [
            threading.Thread(target=lambda: answers.append(first.system.post("/engine/wake_up")))
            for _ in range(4)
        ]
        for call in calls:
            call.start()
        for call in calls:
            call.join()
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
        lock.release()
        shadow.until("active")


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


@pytest.mark.parametrize(("how", "rank"), [("sleep", 0), ("gil", 0), ("stop", 1), ("gil", 1)])
def test_a_wake_that_hangs_ends_the_engine_in_time(
    tiny_model: Path, cohort: Path, how: str, rank: int
) -> None:
    environment = {"FAKE_WAKE": how, "FAKE_WAKE_RANK": str(rank)}
    with ShadowProcess(tiny_model, cohort, "a", environment, **MANUAL) as shadow:
        shadow.until("standby")
        workers, watcher = shadow.workers(), Watcher(shadow.port)
        try:
            assert len(workers) == 2
            began = time.monotonic()
            with pytest.raises(httpx.TransportError):
                shadow.system.post("/engine/wake_up")
            code = shadow.process.wait(DEADLINE_S + 10)
            wait_until(lambda: not any(map(is_alive, workers)), "the end of the ranks")
            seconds = time.monotonic() - began
        finally:
            watcher.stop()
        print(f"{how} of rank {rank}: gone after {seconds:.2f} s of {DEADLINE_S:g} s")
        assert DEADLINE_S <= seconds <= DEADLINE_S + 1.0
        assert code == 1 and watcher.num_seen == 0
    lock = CohortLock(cohort, "default")
    assert lock.try_acquire(), "the next engine can have the lock"
    lock.release()


HANGS = """
import asyncio, sys, tests.server.fake_server as program
from segue.server import canary
async def hang(runtime, directory):
    {how}
canary.check = hang
sys.exit(program.main())
"""


@pytest.mark.parametrize("how", [SLEEP, HOLD_GIL])
def test_a_frontend_that_hangs_in_a_wake_ends_with_its_ranks(
    tiny_model: Path, cohort: Path, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "hanging_server.py"
    program.write_text(HANGS.format(how=how))
    monkeypatch.setattr("tests.support.shadows.PROGRAM", str(program))
    with ShadowProcess(tiny_model, cohort, "a", **MANUAL) as shadow:
        shadow.until("standby")
        workers, watcher = shadow.workers(), Watcher(shadow.port)
        began = time.monotonic()
        with pytest.raises(httpx.TransportError):
            shadow.system.post("/engine/wake_up")
        assert shadow.process.wait(DEADLINE_S + 10) == 1
        wait_until(lambda: not any(map(is_alive, workers)), "the end of the ranks")
        seconds = time.monotonic() - began
        watcher.stop()
        print(f"front: gone after {seconds:.2f} s of {DEADLINE_S:g} s")
        assert DEADLINE_S <= seconds <= DEADLINE_S + 1.0
        assert watcher.num_seen == 0


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"FAKE_WAKE": "fail"}, "rank 0 cannot wake: MemoryError: no pages are left"),
        ({"FAKE_TOKEN": "1"}, "and every bit counts"),
    ],
)
def test_a_wake_that_fails_leaves_the_lock_to_the_next_engine(
    tiny_model: Path, cohort: Path, environment: dict[str, str], said: str
) -> None:
    with ShadowProcess(tiny_model, cohort, "a", deterministic=True) as first:
        first.until("active")
        with ShadowProcess(tiny_model, cohort, "b", environment, deterministic=True) as second:
            second.until("standby")
            first.process.kill()
            assert second.process.wait(20) == 1
            assert second.process.stdout is not None
            text = second.process.stdout.read()
            assert text.startswith("failed ") and said in text
    with ShadowProcess(tiny_model, cohort, "c", deterministic=True) as third:
        third.until("active")
        assert third.probe("health")[1]["epoch"] == 3, "the failed one had claimed an epoch"


def test_a_parked_shadow_that_dies_or_stops_is_seen(tiny_model: Path, cohort: Path) -> None:
    with ShadowProcess(tiny_model, cohort, "a", wake="manual", tp=2, exit_grace=20.0) as shadow:
        shadow.until("standby")
        ranks = shadow.workers()
        os.kill(ranks[1], signal.SIGSTOP)
        began = time.monotonic()
        wait_until(lambda: shadow.probe("live")[0] == 503, "the 503 of /live")
        seen = time.monotonic() - began
        assert "a worker rank has not answered for" in shadow.probe("live")[1]["message"]
        os.kill(ranks[1], signal.SIGCONT)
        wait_until(lambda: shadow.probe("live")[0] == 200, "its recovery")
        began = time.monotonic()
        os.kill(ranks[1], signal.SIGKILL)
        wait_until(lambda: shadow.probe("live")[0] == 503, "the 503 of /live")
        killed = time.monotonic() - began
        print(f"stopped rank seen after {seen:.2f} s, killed rank after {killed:.3f} s")
        assert killed < 5.0
        assert not shadow.listens()


def test_an_engine_that_loses_its_lock_ends_at_once(tiny_model: Path, cohort: Path) -> None:
    with ShadowProcess(tiny_model, cohort, "a", exit_grace=30.0) as first:
        first.until("active")
        (cohort / "default.lock").unlink()
        with ShadowProcess(tiny_model, cohort, "b") as second:
            assert first.process.wait(10) == 1
            second.until("active")


def test_a_hand_over_ends_the_engine_and_wakes_the_next(tiny_model: Path, cohort: Path) -> None:
    with ShadowProcess(tiny_model, cohort, "a", {"FAKE_STEP_S": "0.02"}) as first:
        first.until("active")
        refused = first.system.post("/engine/hand_over")
        assert (refused.status_code, refused.json()["error_code"]) == (409, "no_standby")
        with ShadowProcess(tiny_model, cohort, "b") as second:
            second.until("standby")
            wait_until(lambda: list(cohort.glob("standby-*")), "the sign of the one that waits")
            running = threading.Thread(target=first.generate, args=("abc", 400))
            running.start()
            wait_until(lambda: RUNNING.search(first.system.get("/metrics").text), "a request")
            began = time.monotonic()
            assert first.system.post("/engine/hand_over").status_code == 202
            wait_until(second.listens, "the takeover")
            print(f"handed over in {time.monotonic() - began:.3f} s")
            assert first.process.wait(10) == 0
            running.join()
            second.until("active")


def test_sigterm_ends_a_shadow_and_a_plain_server_has_no_system_port(tiny_model: Path, cohort: Path) -> None:
    lock = CohortLock(cohort, "default")
    assert lock.try_acquire()
    with ShadowProcess(tiny_model, cohort, "a") as shadow:
        shadow.until("standby")
        shadow.process.send_signal(signal.SIGTERM)
        assert shadow.process.wait(10) == 0
    lock.release()
