from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from segue.config import EngineConfig
from segue.host import usable_cores
from segue.launch.processes import (
    WORKER_COMMAND,
    WorkerProcesses,
    touched_bytes,
    worker_environment,
)
from segue.launch.run_dir import RunDir
from tests.conftest import WaitUntil

SLEEPER = (sys.executable, "-c", "import sys; sys.stdin.buffer.read()")
STUBBORN = (sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def workers(tmp_path: Path, command: tuple[str, ...], tp: int = 1) -> WorkerProcesses:
    return WorkerProcesses(EngineConfig(tp=tp), RunDir(), command)


def test_workers_end_when_their_lifeline_closes(tmp_path: Path) -> None:
    group = workers(tmp_path, SLEEPER, tp=2)
    exits: list[str] = []
    group.start(exits.append)
    pids = group.pids
    assert len(pids) == 2
    assert all(is_alive(pid) for pid in pids)
    assert asyncio.run(group.stop(0.0, 10.0))
    assert not any(is_alive(pid) for pid in pids)
    assert exits == []  # the exit was requested
    assert not group._run_dir.path.exists()


def test_a_worker_that_does_not_end_is_killed(tmp_path: Path) -> None:
    group = workers(tmp_path, STUBBORN)
    group.start(lambda _: None)
    (pid,) = group.pids
    asyncio.run(group.stop(0.0, 0.05))
    assert not is_alive(pid)


def test_stopping_twice_is_harmless(tmp_path: Path) -> None:
    group = workers(tmp_path, SLEEPER)
    group.start(lambda _: None)
    asyncio.run(group.stop(0.0, 10.0))
    asyncio.run(group.stop(0.0, 10.0))


def test_a_workers_death_is_reported_with_its_reason(tmp_path: Path, wait_until: Any) -> None:
    group = workers(tmp_path, SLEEPER)
    exits: list[str] = []
    group.start(exits.append)
    os.kill(group.pids[0], signal.SIGKILL)
    wait_until(lambda: exits)
    assert f"rank 0 (pid {group.pids[0]}) ended by signal SIGKILL" in exits[0]
    asyncio.run(group.stop(0.0, 1.0))


def test_a_worker_that_never_reads_its_configuration_is_reported_too(tmp_path: Path, wait_until: Any) -> None:
    group = workers(tmp_path, ("/bin/false",))
    exits: list[str] = []
    group.start(exits.append)
    wait_until(lambda: exits)
    assert "exit code 1" in exits[0]
    asyncio.run(group.stop(0.0, 1.0))


def test_the_users_directory_does_not_shadow_the_standard_library(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('shadowed')")
    program = "from segue.launch.processes import WORKER_COMMAND as c; print(*c[1:3])"
    command = [sys.executable, "-P", "-c", program]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout.split() == ["-P", "-m"], result.stderr


def test_a_worker_finds_the_package_that_its_parent_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH")
    environment = worker_environment(1)
    del environment["OMP_NUM_THREADS"]
    # -S: an installed package must not be found either
    command = [sys.executable, "-S", "-P", "-c", "import segue; print(segue.__path__[0])"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    import segue

    assert Path(result.stdout.strip()) == Path(segue.__path__[0]), result.stderr


def test_cores_are_shared_between_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = usable_cores()
    assert worker_environment(1)["OMP_NUM_THREADS"] == str(cores)
    assert worker_environment(cores)["OMP_NUM_THREADS"] == "1"
    assert worker_environment(10 * cores)["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("name", "ours", "theirs"),
    [("TRITON_STORE_BINARY_ONLY", "1", "0"), ("CUDA_MODULE_LOADING", "LAZY", "EAGER")],
)
def test_kernels_are_kept_without_texts_and_loaded_when_needed_unless_the_user_wants_otherwise(
    monkeypatch: pytest.MonkeyPatch, name: str, ours: str, theirs: str
) -> None:
    monkeypatch.delenv(name, raising=False)
    assert worker_environment(1)[name] == ours
    monkeypatch.setenv(name, theirs)
    assert worker_environment(1)[name] == theirs


def test_a_users_own_threads_are_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert worker_environment(2)["OMP_NUM_THREADS"] == "7"


def test_killed_workers_are_gone_at_once_and_nobody_is_told(tmp_path: Path) -> None:
    group = workers(tmp_path, STUBBORN, tp=2)
    exits: list[str] = []
    group.start(exits.append)
    group.kill()
    asyncio.run(group.wait_gone())
    assert not any(is_alive(pid) for pid in group.pids)
    assert exits == []
    assert asyncio.run(group.stop(0.0, 1.0))


PARENT = """
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print(worker.pid, worker.stdout.readline(), flush=True)
time.sleep(600)
"""
HANGING = """
import ctypes
from segue.host import end_with_parent
end_with_parent()
print("hangs", flush=True)
ctypes.PyDLL(None).sleep(600)  # holds the GIL
"""


@pytest.mark.parametrize("stops", [False, True])
def test_a_worker_that_hangs_is_killed_with_its_parent(stops: bool, wait_until: WaitUntil) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, HANGING], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline().split()[0])
        if stops:
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
    wait_until(lambda: not is_alive(pid))


def test_touched_bytes_grow_with_what_a_process_reads_and_has() -> None:
    # In a process of its own: what this one has touched so far may be more than a further block.
    fill = "block = bytearray(64 << 20); block[::4096] = b'x' * len(block[::4096])"
    script = f"input(); {fill}; print(flush=True); input()"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None and process.stdout is not None
        before = touched_bytes([process.pid])
        process.stdin.write(b"\n")
        assert process.stdout.readline() == b"\n"
        assert touched_bytes([process.pid]) - before > 32 << 20
        process.stdin.write(b"\n")
    assert touched_bytes([2**22 + 1]) == 0, "no such process"


def test_a_worker_that_starts_after_its_run_directory_was_removed_ends_silently(tmp_path: Path) -> None:
    gone = RunDir()
    gone.remove()
    # The frontend removes the directory once it has given up.
    group = WorkerProcesses(EngineConfig(tp=2), gone, ())
    with subprocess.Popen(WORKER_COMMAND, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        group._send_config(process, 0)
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == b""
