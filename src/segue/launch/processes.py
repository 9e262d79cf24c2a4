"""Starts, watches and stops the worker processes, or an embedded scheduler in their place."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import zmq

from segue.children import describe_exit, import_path
from segue.config import EngineConfig
from segue.host import read_number, usable_cores
from segue.launch.run_dir import RunDir
from segue.logs import logger

# -P: files in the user's directory must not shadow modules of the standard library.
WORKER_COMMAND: tuple[str, ...] = (sys.executable, "-P", "-m", "segue.worker.entry")
POLL_S = 0.005
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
KILL_S = 5.0  # for a killed process to end
# A step's temporaries are freed and soon allocated again, so malloc keeps their memory, in huge pages. A
# decode step of one request gets 6 to 9 % faster, and prefill no longer has page faults.
MALLOC = ":".join(
    f"glibc.malloc.{tunable}"
    for tunable in ("hugetlb=1", "mmap_threshold=1073741824", "trim_threshold=1073741824")
)


def worker_environment(num_workers: int) -> dict[str, str]:
    """Return the environment of a worker, if ``num_workers`` share this host."""
    environment = {
        # Waiting OpenMP threads may spin during the gap between two operations: if every operation has to
        # wake them, a step takes twice as long. They must not spin during the gap between two steps, as they
        # do by GNU's default: beside one busy core that makes a step four times slower.
        "GOMP_SPINCOUNT": "10000",
        "GLIBC_TUNABLES": MALLOC,
        # Nothing here profits from NVLink multicast, and where it is broken, communication hangs.
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        # Triton would also keep five texts of each kernel, and read them at each start: half of its loading.
        "TRITON_STORE_BINARY_ONLY": "1",
        # torch sets it, too, but a worker calls the driver before that; old drivers load all kernels at once.
        "CUDA_MODULE_LOADING": "LAZY",
        "OMP_NUM_THREADS": str(max(1, usable_cores() // num_workers)),
    } | os.environ
    return environment | import_path(environment)


def touched_bytes(pids: Sequence[int]) -> int:
    """Return the bytes that processes have in memory, and have read so far; those that have ended count 0."""
    total = 0
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
            total += read_number(Path(f"/proc/{pid}/io"), "rchar") or 0
    return total


class WorkerProcesses:
    """One process per rank. It ends when its standard input closes, and is killed when this one dies."""

    def __init__(
        self,
        config: EngineConfig,
        run_dir: RunDir,
        command: Sequence[str] = WORKER_COMMAND,
        *,
        shows_start: bool = False,
    ) -> None:
        """Choose the sockets' addresses in ``run_dir``; ``command`` is the command line of a worker.

        ``shows_start``: this process shows how the start gets on, so that workers need not.
        """
        self._config = config
        self._shows_start = shows_start
        self._run_dir = run_dir
        self._command = list(command)
        self.addresses = (f"ipc://{run_dir.path}/to_scheduler", f"ipc://{run_dir.path}/to_frontend")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stopping = False

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [process.pid for process in self._processes]

    def start(self, on_exit: Callable[[str], None]) -> None:
        """Start every rank. If one ends by itself, a thread calls ``on_exit`` with the reason, a sentence."""
        environment = worker_environment(self._config.tp)
        for rank in range(self._config.tp):
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                env=environment,
                start_new_session=True,  # Ctrl-C in the terminal reaches only this process, which stops them
            )
            self._processes.append(process)
            self._send_config(process, rank)
            threading.Thread(
                target=self._watch, args=(rank, process, on_exit), name=f"segue-watch-{rank}", daemon=True
            ).start()

    async def stop(self, polite_s: float, patience_s: float) -> bool:
        """Stop all workers, and return True.

        Rank 0 has ``polite_s`` seconds to end by itself. Then every worker's standard input is closed, at
        which it ends. Workers that still run ``patience_s`` seconds after the call are killed. May be called
        again. Starts no thread, because none can start at the interpreter's exit.
        """
        self._stopping = True
        deadline = time.monotonic() + patience_s
        await self._wait(self._processes[:1], time.monotonic() + polite_s)
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
        await self._wait(self._processes, deadline)
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        await self._wait(self._processes, time.monotonic() + KILL_S)
        self._run_dir.remove()
        return True

    def kill(self) -> None:
        """Kill all workers at once; any thread may call it. No exit of theirs is reported."""
        self._stopping = True
        for process in self._processes:
            process.kill()

    async def wait_gone(self) -> None:
        """Wait until all workers have ended, for at most ``KILL_S`` seconds; they must have been killed."""
        await self._wait(self._processes, time.monotonic() + KILL_S)

    async def _wait(self, processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
        """Wait until all ``processes`` have ended, or until ``deadline``, a time of the monotonic clock."""
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)

    def _send_config(self, process: subprocess.Popen[bytes], rank: int) -> None:
        """Write a worker its options, its rank and the sockets' directory, as a line of JSON to its input."""
        line = {
            "config": asdict(self._config),
            "rank": rank,
            "size": self._config.tp,
            "run_dir": str(self._run_dir.path),
            "parent": os.getpid(),
            "shows_start": self._shows_start,
        }
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # the worker has ended, and its watcher reports that
            process.stdin.write(json.dumps(line).encode() + b"\n")
            process.stdin.flush()

    def _watch(self, rank: int, process: subprocess.Popen[bytes], on_exit: Callable[[str], None]) -> None:
        """Wait in a thread for a worker's end, and report it unless the workers are being stopped."""
        code = process.wait()
        if not self._stopping:
            on_exit(f"worker rank {rank} (pid {process.pid}) ended {describe_exit(code)}")


class EmbeddedScheduler:
    """Runs rank 0's scheduler and model runner in a thread of this process. There is no other rank.

    It has the attributes and methods of :class:`WorkerProcesses`, so that the runtime can use either.
    """

    addresses = ("inproc://to_scheduler", "inproc://to_frontend")

    def __init__(
        self, config: EngineConfig, run_dir: RunDir, context: zmq.Context[zmq.Socket[bytes]]
    ) -> None:
        """Prepare the thread. ``context`` must be the frontend's: its sockets join threads of one process."""
        self._config = config
        self._run_dir = run_dir
        self._context = context
        self.pids: list[int] = []  # there are no worker processes
        self._thread = threading.Thread(target=self._run, name="segue-scheduler", daemon=True)

    def start(self, on_exit: Callable[[str], None]) -> None:
        """Start the thread. When it ends, it calls ``on_exit`` with the reason, a sentence."""
        self._on_exit = on_exit
        self._thread.start()

    async def stop(self, polite_s: float, patience_s: float) -> bool:
        """Wait until the thread has ended, as it does once it has received ``Shutdown``.

        A thread cannot be killed: after the longer of the two times this returns False if it still runs.
        """
        deadline = time.monotonic() + max(polite_s, patience_s)
        while self._thread.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        self._run_dir.remove()
        return not self._thread.is_alive()

    def kill(self) -> None:
        """Do nothing: a thread cannot be killed."""

    async def wait_gone(self) -> None:
        """Do nothing, as :meth:`kill` does."""

    def _run(self) -> None:
        """Run the scheduler until it ends or fails, then report the reason."""
        reason = "the embedded scheduler ended"
        try:
            from segue.worker.main import run_scheduler  # imports torch, which takes seconds

            run_scheduler(self._config, self._run_dir.path, self.addresses, self._context, embedded=True)
        except Exception as error:
            logger.exception("the embedded scheduler failed")
            reason = f"the embedded scheduler failed: {type(error).__name__}: {error}"
        self._on_exit(reason)
