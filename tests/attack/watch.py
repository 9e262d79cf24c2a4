"""Requests ``/health`` repeatedly, from a process of its own that an attack's load does not slow down."""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

from tests.attack.target import Target
from tests.support.child import start_child

EVERY_S = 0.025
TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class HealthProbe:
    """One request for ``/health``, on a connection of its own."""

    seconds: float  # until the answer was read, or the request failed
    status: int  # 0: there was no answer


class Watch:
    """Probes ``/health`` while the ``with`` block runs."""

    def __init__(self, target: Target) -> None:
        self.probes: list[HealthProbe] = []
        host, port = target.address
        command = [sys.executable, "-m", "tests.attack.watch", host, str(port)]
        self._process = start_child(command, stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read)

    def __enter__(self) -> Watch:
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._reader.join()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if line.endswith("\n"):
                    seconds, status = line.split()
                    self.probes.append(HealthProbe(float(seconds), int(status)))


def ask(host: str, port: int) -> HealthProbe:
    """Request ``/health`` once."""
    began, status = time.monotonic(), 0
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        response.read()
        status = response.status
    except (OSError, http.client.HTTPException):
        pass
    finally:
        connection.close()
    return HealthProbe(time.monotonic() - began, status)


if __name__ == "__main__":
    while True:
        probe = ask(sys.argv[1], int(sys.argv[2]))
        print(f"{probe.seconds:.6f} {probe.status}", flush=True)
        time.sleep(EVERY_S)
