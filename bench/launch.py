"""Starts a server, waits until it is ready, and stops it."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from segue.gms.client import GmsClient
from segue.gms.client_connection import GmsTarget

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0


def free_port() -> int:
    """Return a port that no process listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def filled(command: str, *, model: str, port: int) -> list[str]:
    """Return the words of a command, in which ``{model}`` and ``{port}`` are replaced."""
    words = shlex.split(command)
    return [word.replace("{model}", model).replace("{port}", str(port)) for word in words]


@contextmanager
def served(*options: str) -> Iterator[str]:
    """Yield the base URL of a `segue serve` that answers 200 on ``/health``; stop it afterwards."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "segue",
        "serve",
        "--port",
        str(port),
        "--log-level",
        "warning",
        *options,
    ]
    with running(command, f"http://127.0.0.1:{port}"):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def running(
    command: Sequence[str],
    url: str,
    *,
    start_timeout: float = START_TIMEOUT_S,
    log: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[float]:
    """Start `command` as `started` does, and yield the seconds until ``/health`` was 200."""
    began = time.monotonic()
    with started(command, url, start_timeout=start_timeout, log=log, env=env):
        yield time.monotonic() - began


@contextmanager
def started(
    command: Sequence[str],
    url: str,
    *,
    start_timeout: float = START_TIMEOUT_S,
    log: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start `command` in a process group of its own, yield it once ``/health`` is 200, and stop it.

    Raises:
        RuntimeError: the server ended before it was ready.
        TimeoutError: the server was not ready within `start_timeout` seconds.
    """
    with open(log or os.devnull, "wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output if log else None,
            start_new_session=True,
            env=env,
        )
    try:
        _wait(process, url, start_timeout)
        yield process
    finally:
        _stop(process)


@contextmanager
def memory_service(devices: str) -> Iterator[str]:
    """Yield the directory of a memory service for devices, ``cpu`` or ``all``."""
    with tempfile.TemporaryDirectory(prefix="segue-bench-gms-") as directory:
        words = [sys.executable, "-m", "segue", "gms", "serve", "--gms-dir", directory, "--devices", devices]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        try:
            GmsClient(GmsTarget(directory=directory, tag="watch")).close()
            yield directory
        finally:
            process.terminate()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, seconds: float) -> None:
    """Wait until the server answers 200 on ``/health``; raise if it ends before, or takes too long."""
    deadline = time.monotonic() + seconds
    with httpx.Client(timeout=2) as client:
        while True:
            if process.poll() is not None:
                raise RuntimeError(
                    f"the server ended with exit code {process.returncode} before it was ready"
                )
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server at {url} was not ready after {seconds:g} s")
            try:
                if client.get(f"{url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.02)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Let the server shut down, then kill its process group."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    with suppress(ProcessLookupError):  # child processes that are left would keep the GPU's memory
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
