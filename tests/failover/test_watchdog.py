from __future__ import annotations

import subprocess
import sys
import time

import pytest

from segue.failover.watchdog import TRACEBACK_S

TIMEOUT_S = 0.3
PROGRAM = """
import ctypes, logging, sys, time
from segue.failover.watchdog import Watchdog
logging.basicConfig()
with Watchdog({timeout}, lambda: print("killed", flush=True), "the wake"):
    {work}
time.sleep({timeout} + {more} + 0.2)
print("went on")
"""


def run(work: str) -> tuple[subprocess.CompletedProcess[str], float]:
    program = PROGRAM.format(timeout=TIMEOUT_S, more=TRACEBACK_S, work=work)
    began = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    return ended, time.monotonic() - began


def test_work_that_ends_in_time_is_left_alone() -> None:
    ended, _ = run("pass")
    assert (ended.returncode, ended.stdout) == (0, "went on\n")


@pytest.mark.parametrize("work", ["time.sleep(600)", "sys.modules['threading'].Event().wait()"])
def test_work_that_takes_too_long_ends_the_process_once_the_workers_are_killed(work: str) -> None:
    ended, seconds = run(work)
    assert (ended.returncode, ended.stdout) == (1, "killed\n")
    assert "the wake has taken more than 0.3 s; this process ends" in ended.stderr
    assert seconds >= TIMEOUT_S


def test_work_that_holds_the_gil_ends_the_process_and_shows_where_it_hangs() -> None:
    ended, seconds = run("ctypes.PyDLL(None).sleep(600)")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "Timeout" in ended.stderr and 'File "<string>", line 6' in ended.stderr
    assert seconds >= TIMEOUT_S + TRACEBACK_S
