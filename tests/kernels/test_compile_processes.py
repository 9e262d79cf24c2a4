"""The processes that compile kernels for a worker, without Triton: they do other jobs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import WaitUntil

# The job's name says what is done; `name` is printed by whoever does it, with its process id.
SCRIPT = """
import ctypes, os, signal, sys, threading
from concurrent.futures import ThreadPoolExecutor
from segue.kernels.compile_processes import CompileProcesses, Variant

def work(job):
    if job.name == "fails":
        raise ValueError("no such kernel")
    if job.name == "dies":
        os._exit(3)
    if job.name == "hangs":
        print(os.getpid(), flush=True)
        threading.Event().wait()
    os.write(writer, f"{os.getpid()} ".encode())

def job(name):
    empty = dict.fromkeys(("signature", "attrs", "options"), {})
    return Variant(module="m", name=name, constants={(1,): None}, target=0, **empty)

def assert_all_are_gone():
    try:
        raise AssertionError(f"nobody has waited for {os.waitpid(-1, 0)}")
    except ChildProcessError:
        print("done")

PR_SET_CHILD_SUBREAPER = 36  # as PID 1 of a container, this process gets children whose parents have ended
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
reader, writer = os.pipe()
"""
FORK = """
processes = CompileProcesses.fork(3, work)
"""
WORKS = """
with ThreadPoolExecutor(3) as threads:
    assert list(threads.map(processes.compile, [job("works")] * 20)) == [True] * 20
pids = set(map(int, os.read(reader, 1000).split()))
assert pids and os.getpid() not in pids and processes.pid not in pids, pids
assert processes.compile(job("fails")) is False
assert processes.compile(job(lambda: "cannot be pickled")) is False
assert processes.compile(job("works")) is True
processes.close()
assert processes.compile(job("works")) is False
assert_all_are_gone()
"""
DIES = """
with ThreadPoolExecutor(3) as threads:
    assert list(threads.map(processes.compile, [job("hangs"), job("hangs"), job("dies")])) == [False] * 3
assert processes.compile(job("works")) is False
processes.close()
assert_all_are_gone()
"""
UNUSED = """
processes.close()
assert_all_are_gone()
"""
FEWER = (
    """
fork, forked = os.fork, []

def fork_twice():
    forked.append(None)
    if len(forked) > 2:
        raise BlockingIOError("too many processes")
    return fork()

os.fork = fork_twice
"""
    + FORK
    + """
assert processes.compile(job("works")) is True
processes.close()
assert_all_are_gone()
"""
)
HANGS = """
processes.compile(job("hangs"))
"""


SCRIPTS = {
    "works": FORK + WORKS,
    "dies": FORK + DIES,
    "unused": FORK + UNUSED,
    "fewer": FEWER,
    "signals ignored": "for each in (signal.SIGTERM, signal.SIGCHLD): signal.signal(each, signal.SIG_IGN)"
    + (FORK + DIES),
}


@pytest.mark.parametrize("steps", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_jobs_are_done_or_are_left_to_the_worker(steps: str) -> None:
    """In any case no process is left, not even as a zombie."""
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT + steps], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("done\n") and not result.stderr  # one may die while it prints


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_they_end_with_the_worker(ending: signal.Signals, wait_until: WaitUntil) -> None:
    command = [sys.executable, "-c", SCRIPT + FORK + HANGS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        pid = int(worker.stdout.readline())
        first = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert first != worker.pid and (Path(f"/proc/{pid}/fd/0").resolve() == Path(os.devnull))
        worker.send_signal(ending)
    wait_until(lambda: not any(map(is_alive, (pid, first))))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
