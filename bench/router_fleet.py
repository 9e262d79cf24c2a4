"""A router in front of fake workers, its client processes, and what the system knows of all of them."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import launch

MIB = 1 << 20
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A router in front of workers, and the processes of its clients."""

    router: Sequence[int]  # process ids; where there are several, the coordinator's first
    url: str
    workers: Sequence[str]
    worker_pids: Sequence[int]
    pool: ProcessPoolExecutor
    num_clients: int  # processes


@contextmanager
def fleet(processes: int, router_processes: int = 1) -> Iterator[Fleet]:
    """Start as many workers, a router and as many client processes."""
    with ExitStack() as stack:
        workers, pids = [], []
        for _ in range(processes):
            port = launch.free_port()
            workers.append(f"http://127.0.0.1:{port}")
            command = [sys.executable, "-m", "bench.fake_worker", str(port)]
            pids.append(stack.enter_context(launch.started(command, workers[-1])).pid)
        port = launch.free_port()
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "segue", "router", "--port", str(port), "--log-level", "error"]
        command += ["--processes", str(router_processes)]
        router = stack.enter_context(launch.started([*command, "--worker", *workers], url))
        spawn = multiprocessing.get_context("spawn")
        pool = stack.enter_context(ProcessPoolExecutor(processes, mp_context=spawn))
        list(pool.map(time.sleep, [0.2] * processes))  # so that each process is started
        yield Fleet(
            router=[router.pid, *_children(router.pid)],
            url=url,
            workers=workers,
            worker_pids=pids,
            pool=pool,
            num_clients=processes,
        )


# --- what the system knows of a process ---


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far, all threads together, in seconds."""
    try:  # in nanoseconds, where the kernel counts them
        lines = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        return sum(int(line.split()[0]) for line in lines) / 1e9
    except OSError:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICK


def _children(pid: int) -> list[int]:
    """Return the ids of the processes that a process has started."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for file in files for word in file.read_text().split()]


def busy_s() -> float:
    """Return the time that the cores of the machine have worked so far, all together, in seconds."""
    user, nice, system, _, _, irq, soft, *_ = (
        int(word) for word in Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
    )
    return (user + nice + system + irq + soft) / TICK


def rss_mib(pid: int) -> float:
    """Return the memory of a process that is in RAM, in MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


def num_descriptors(pid: int) -> int:
    """Return the number of files and sockets that a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def stats(worker: str) -> dict[str, Any]:
    """Return what a worker says of itself."""
    found: dict[str, Any] = json.loads(_get(f"{worker}/stats"))
    return found


def num_held(url: str) -> int:
    """Return the legs that the router has in flight, on all workers."""
    name = "segue:router_in_flight{"
    return sum(
        int(float(line.split()[1])) for line in _get(f"{url}/metrics").splitlines() if line.startswith(name)
    )


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        text: str = response.read().decode()
        return text
