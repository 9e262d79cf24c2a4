"""An engine that was stopped and replaced goes on: nothing of it reaches a client, and it ends."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import httpx

from segue.failover.lock import CohortLock
from tests.e2e.test_shadow_router import EXPECTED, STEP, Stream, routed
from tests.support.shadows import ShadowProcess, wait_until


def workers_of(router: str) -> list[str]:
    return [each["url"] for each in httpx.get(f"{router}/workers").json()["workers"]]


def test_a_stopped_engine_that_was_replaced_adds_nothing_and_ends(tiny_model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "cohort"
    with routed(directory) as url, ShadowProcess(tiny_model, directory, "a", STEP) as old:
        old.until("active")
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 200, "the router's readiness")
        streams = [Stream(url) for _ in range(3)]
        wait_until(lambda: all(len(stream.ids) > 5 for stream in streams), "the first tokens")
        old.process.send_signal(signal.SIGSTOP)
        (directory / "default.lock").unlink()  # a stopped engine has its lock; now another one can have one
        with ShadowProcess(tiny_model, directory, "b", STEP) as new:
            new.until("active")
            assert new.probe("health")[1]["epoch"] == 2
            late = Stream(url)
            wait_until(lambda: late.ids, "requests go on")
            old.process.send_signal(signal.SIGCONT)
            assert [stream.result() for stream in (*streams, late)] == [EXPECTED] * 4
            assert old.process.wait(60) != 0, "it looks at its lock, and ends"
            wait_until(lambda: workers_of(url) == [new.url], "the router has forgotten it")


def test_an_engine_whose_directory_is_removed_leaves_its_epoch_to_the_next_one(
    tiny_model: Path, tmp_path: Path
) -> None:
    """While nobody stands by, only the engine that serves knows the epoch; routers would drop a lower one."""
    directory = tmp_path / "cohort"
    directory.mkdir(mode=0o700)
    (directory / "standby-00000000-00000000.lock").touch()  # of an engine that was killed
    with ShadowProcess(tiny_model, directory, "a", STEP) as old:
        old.until("active")
        assert not list(directory.glob("standby-*")), "nobody waits"
        shutil.rmtree(directory)
        assert old.process.wait(60) != 0, "it looks at its lock, and ends"
    next_one = CohortLock(directory, "default")
    assert next_one.try_acquire()
    assert next_one.claim("b", "http://127.0.0.1:1", 0) == 2
    next_one.release()
