"""A `segue serve` of our own: started, ready, stopped."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

START_TIMEOUT_S = 120.0


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def served(*options: str) -> Iterator[str]:
    """Yield the base URL of a server that answers 200 on ``/health``; stop it afterwards."""
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
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, url)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    with httpx.Client(timeout=2) as client:
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"segue serve ended with exit code {process.returncode}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"segue serve was not ready after {START_TIMEOUT_S:g} s")
            try:
                if client.get(f"{url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.02)
