"""Measures a server: memory, files and threads of its processes, requests and pages of its engine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.attack.target import Target

MIB = 1 << 20
SETTLE_S = 20.0
# Descriptors, and threads, that a server may hold in addition after an attack: for pools that grow to their
# size once, and for the connection of the watch.
SPARE = 24
# Fields of the engine's state that have to be as before once nothing runs; the others are counters.
KEPT = (
    "engine_paused",
    "pause_mode",
    "waiting_queue_size",
    "running_batch_size",
    "chunked_req_is_none",
    "tree_cache_size",
    "req_to_token_pool_used",
    "available_kv_tokens",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The sum of what the server's processes hold."""

    resident: int  # bytes
    files: int
    threads: int


def processes(pid: int) -> Iterator[int]:
    """Yields a process and all its descendants."""
    yield pid
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from processes(int(child))


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def usage(pid: int) -> Usage:
    """Returns the usage of the server with this process; processes that end meanwhile are not counted."""
    resident = files = threads = 0
    for each in processes(pid):
        with suppress(OSError):
            status = dict(
                line.split(":", 1) for line in Path(f"/proc/{each}/status").read_text().splitlines()
            )
            resident += int(status.get("VmRSS", "0 kB").split()[0]) * 1024
            threads += int(status["Threads"])
            files += len(os.listdir(f"/proc/{each}/fd"))
    return Usage(resident=resident, files=files, threads=threads)


def settled(pid: int, before: Usage) -> Usage:
    """Returns the usage once files and threads are near ``before``, or after ``SETTLE_S``."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        now = usage(pid)
        kept = max(now.files - before.files, now.threads - before.threads)
        if kept <= SPARE or time.monotonic() > deadline:
            return now
        time.sleep(0.1)


def rest(target: Target) -> dict[str, Any]:
    """Returns the engine's state once it is idle with an empty cache, or after ``SETTLE_S``.

    Raises:
        httpx.HTTPError: the server does not answer.
    """
    deadline = time.monotonic() + SETTLE_S
    with httpx.Client(base_url=target.url, headers=target.headers, timeout=SETTLE_S, trust_env=False) as http:
        while True:
            http.post("/continue_generation", json={})
            http.post("/flush_cache")
            state = http.get("/server_info").json()["internal_states"][0]
            kept = {name: state[name] for name in KEPT}
            busy = kept["running_batch_size"] or kept["waiting_queue_size"] or kept["req_to_token_pool_used"]
            if not (busy or kept["tree_cache_size"]) or time.monotonic() > deadline:
                return kept
            time.sleep(0.1)


def listener(port: int) -> int | None:
    """Returns the process that listens on a TCP port of this machine; None if it cannot be seen."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(os.readlink(file) in sockets for file in (process / "fd").iterdir()):
                return int(process.name)
    return None
