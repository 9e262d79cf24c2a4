from __future__ import annotations

import subprocess
import sys
import time

import pytest

from segue.failover.watchdog import TRACEBACK_S
from tests.conftest import least_measured

TIMEOUT_S = 0.3
PROGRAM = """
import ctypes, logging, sys, time
from segue.failover.watchdog import Watchdog
logging.basicConfig()
print(time.monotonic(), flush=True)
with Watchdog({timeout}, lambda: print("killed", flush=True), "the wake"):
    {work}
time.sleep({timeout} + {more} + 0.2)
print("went on")
"""


def run(work: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run the program; returns also the seconds from the beginning of its work to its end."""
    program = PROGRAM.format(timeout=TIMEOUT_S, more=TRACEBACK_S, work=work)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    seconds = time.monotonic() - float(ended.stdout.splitlines()[0])
    ended.stdout = ended.stdout.partition("\n")[2]
    return ended, seconds


def test_work_that_ends_in_time_is_left_alone() -> None:
    ended, _ = run("pass")
    assert (ended.returncode, ended.stdout) == (0, "went on\n")


@pytest.mark.parametrize("work", ["time.sleep(600)", "sys.modules['threading'].Event().wait()"])
def test_work_that_takes_too_long_ends_the_process_once_the_workers_are_killed(work: str) -> None:
    def measure() -> float:
        ended, seconds = run(work)
        assert (ended.returncode, ended.stdout) == (1, "killed\n")
        assert "the wake has taken more than 0.3 s; this process ends" in ended.stderr
        assert seconds >= TIMEOUT_S
        return seconds

    assert least_measured(TIMEOUT_S + 1.0, measure) < TIMEOUT_S + 1.0


def test_work_that_holds_the_gil_ends_the_process_and_shows_where_it_hangs() -> None:
    def measure() -> float:
        ended, seconds = run("ctypes.PyDLL(None).sleep(600)")
        assert (ended.returncode, ended.stdout) == (1, "")
        assert "Timeout" in ended.stderr and 'File "<string>", line 7' in ended.stderr
        assert seconds >= TIMEOUT_S + TRACEBACK_S
        return seconds

    assert least_measured(TIMEOUT_S + 1.0, measure) < TIMEOUT_S + 1.0
