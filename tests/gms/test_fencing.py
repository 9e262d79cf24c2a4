"""The fence, with real processes: one that is stopped is killed, and one that stands by is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from segue.gms.client import GmsClient
from segue.gms.messages import EpochChanged
from tests.gms.running import DEADLINE_S, running, target, until
from tests.gms.serving import serving
from tests.support.child import start_child

ENGINE = """
import sys, time
from segue.gms.client import GmsClient
from segue.gms.client_connection import GmsTarget
client = GmsClient(GmsTarget(directory=sys.argv[1], engine=sys.argv[2], connect_s=30.0))
if sys.argv[3] == "serves":
    client.claim()
if sys.argv[3] == "leaves":
    client.claim()
    client.close()  # and the process lives on
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    with running(tmp_path / "d"):
        yield tmp_path / "d"


@pytest.fixture
def start() -> Iterator[object]:
    started: list[subprocess.Popen[str]] = []

    def new(directory: Path, name: str, does: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", ENGINE, str(directory), name, does]
        process = start_child(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    yield new
    for each in started:
        each.kill()
        each.communicate()


def test_a_stopped_process_of_an_older_engine_is_killed_and_one_that_stands_by_is_not(
    directory: Path, start: type[subprocess.Popen[str]]
) -> None:
    old, parked = start(directory, "a", "serves"), start(directory, "b", "stands by")
    old.send_signal(signal.SIGSTOP)
    with target(directory, engine="c") as new:
        epoch = new.claim()
        assert epoch == 2
        waits = new.fence(epoch)
        assert (waits.alive, waits.is_proved) == ([old.pid], True), "it is only looked at"
        assert new.fence(epoch, kills=True, wait_s=DEADLINE_S).alive == []
        assert old.wait(DEADLINE_S) == -signal.SIGKILL
        assert parked.poll() is None
        assert "fenced" in [event.kind for event in new.events()]


def test_a_process_is_watched_though_it_has_closed_its_connection(
    directory: Path, start: type[subprocess.Popen[str]]
) -> None:
    old = start(directory, "a", "leaves")
    with target(directory, engine="c") as new:
        epoch = new.claim()
        began = time.monotonic()
        assert new.fence(epoch, wait_s=0.2).alive == [old.pid]
        assert time.monotonic() - began >= 0.2
        os.kill(old.pid, signal.SIGKILL)
        assert new.fence(epoch, wait_s=DEADLINE_S).alive == []


def test_processes_of_another_pid_namespace_are_told_apart(
    tmp_path: Path, start: type[subprocess.Popen[str]]
) -> None:
    """All of them have the process id 0 for the service; their pidfds are their own."""
    with serving(tmp_path / "d", credentials=lambda connection: (0, os.geteuid())) as directory:
        old = start(directory, "a", "leaves")
        start(directory, "b", "stands by")
        with target(directory, engine="c") as new:
            assert new.fence(new.claim(), wait_s=0.1).alive == [0], "the old one is still there"
            old.kill()
            assert new.fence(2, wait_s=DEADLINE_S).alive == []


def test_engines_hear_of_a_newer_one(directory: Path) -> None:
    with target(directory, engine="a") as old, target(directory, engine="b") as new:
        assert old.claim() == 1
        heard: list[int] = []
        old.listen(lambda notice: heard.append(notice.epoch) if isinstance(notice, EpochChanged) else None)
        assert new.claim() == 2
        until(lambda: taken(old) and heard == [2], "the notice does not come")
        assert list(new.notices) == [EpochChanged(epoch=1)], "the one that has claimed needs no notice"


def taken(client: GmsClient) -> bool:
    """Make a call, which takes the notices that have come before its answer."""
    client.note("none")
    return True
