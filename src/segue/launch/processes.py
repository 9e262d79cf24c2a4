"""The worker processes: start, watch, stop."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from segue.config import EngineConfig
from segue.launch.channel import Addresses
from segue.logs import logger

# -P: a file named like a module of the standard library in the user's directory must not shadow it.
WORKER_COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "segue.worker.main")
POLL_S = 0.005
KILL_S = 5.0  # for a killed process to be gone
# A step's temporaries are freed and taken again at once: malloc keeps them, in huge pages. A decode step of
# one row gets 6 to 9 % faster, and prefill takes no page faults any more.
MALLOC = ":".join(
    f"glibc.malloc.{tunable}"
    for tunable in ("hugetlb=1", "mmap_threshold=1073741824", "trim_threshold=1073741824")
)
SOCKET_PATH_MAX = 100  # of 107 bytes that the kernel allows, some for the socket's own name


def make_run_dir() -> Path:
    """A private directory for the sockets of one engine, with a path short enough for them."""
    directory = tempfile.mkdtemp(prefix="segue-")
    if len(os.fsencode(directory)) > SOCKET_PATH_MAX - len("/to_scheduler"):
        os.rmdir(directory)
        directory = tempfile.mkdtemp(prefix="segue-", dir="/tmp")
    return Path(directory)


def socket_addresses(run_dir: Path) -> Addresses:
    """The frontend's sockets in a run directory."""
    return Addresses(f"ipc://{run_dir}/to_scheduler", f"ipc://{run_dir}/to_frontend")


def worker_environment(num_workers: int) -> dict[str, str]:
    """The environment of each of ``num_workers`` processes of one host."""
    environment = dict(os.environ)
    # Waiting OpenMP threads may spin over the gap between two operations: if every operation has to wake
    # them, a step takes twice as long. But not over the gap between steps, as GNU's default has them: beside
    # one busy core that makes a step four times slower.
    environment.setdefault("GOMP_SPINCOUNT", "10000")
    environment.setdefault("GLIBC_TUNABLES", MALLOC)
    # NVLink multicast is of use for nothing here, and where it is broken, communication hangs on it.
    environment.setdefault("NCCL_NVLS_ENABLE", "0")
    environment.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // num_workers)))
    root = Path(__file__).resolve().parents[2]
    if root.name not in ("site-packages", "dist-packages"):  # found by a path that the child may not have
        rest = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{rest}" if rest else str(root)
    return environment


def usable_cores() -> int:
    """Cores this process may use: its affinity, cut to the cgroup's quota."""
    cores = len(os.sched_getaffinity(0))
    quota = cgroup_cores(Path("/sys/fs/cgroup"))
    return max(1, min(cores, int(quota))) if quota else cores


def cgroup_cores(root: Path) -> float | None:
    """The CPU quota in cores of a cgroup (version 2, then 1), or None if there is none."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    return int(quota) / int(period) if quota.isdigit() and int(period) > 0 else None


class WorkerProcesses:
    """One process a rank. They end when their standard input closes, so when we die, they do."""

    def __init__(self, config: EngineConfig, run_dir: Path, command: Sequence[str] = WORKER_COMMAND) -> None:
        self._config = config
        self._run_dir = run_dir
        self._command = list(command)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stopping = False

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [process.pid for process in self._processes]

    def start(self, on_exit: Callable[[str], None]) -> None:
        """Start every rank. ``on_exit`` gets a sentence, on another thread, for each that ends by itself."""
        environment = worker_environment(self._config.tp)
        for rank in range(self._config.tp):
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                env=environment,
                start_new_session=True,  # Ctrl-C in the terminal is for us; we tell the workers
            )
            self._processes.append(process)
            self._send_config(process, rank)
            threading.Thread(
                target=self._watch, args=(rank, process, on_exit), name=f"segue-watch-{rank}", daemon=True
            ).start()

    async def stop(self, polite_s: float, patience_s: float) -> bool:
        """Give rank 0 ``polite_s`` to end by itself, close the lifelines, kill the rest after ``patience_s``.

        True: all have ended. May be called again. Needs no thread: at the interpreter's exit there are none.
        """
        self._stopping = True
        deadline = time.monotonic() + patience_s
        await self._wait(self._processes[:1], time.monotonic() + polite_s)
        for process in self._processes:
            _close_lifeline(process)
        await self._wait(self._processes, deadline)
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        await self._wait(self._processes, time.monotonic() + KILL_S)
        shutil.rmtree(self._run_dir, ignore_errors=True)
        return True

    async def _wait(self, processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)

    def _send_config(self, process: subprocess.Popen[bytes], rank: int) -> None:
        line = {
            "config": asdict(self._config),
            "rank": rank,
            "size": self._config.tp,
            "run_dir": str(self._run_dir),
        }
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(line).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            logger.debug("worker rank %d ended before it read its configuration", rank)  # its watcher tells

    def _watch(self, rank: int, process: subprocess.Popen[bytes], on_exit: Callable[[str], None]) -> None:
        code = process.wait()
        if not self._stopping:
            on_exit(f"worker rank {rank} (pid {process.pid}) ended {describe_exit(code)}")


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"with exit code {code}"
    hint = ", perhaps for want of memory" if -code == signal.SIGKILL else ""
    return f"by signal {signal.Signals(-code).name}{hint}"


def _close_lifeline(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.close()
    except BrokenPipeError:
        logger.debug("worker %d had ended", process.pid)
