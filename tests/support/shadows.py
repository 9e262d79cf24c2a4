"""Engines of one cohort, each the real server process over the fake worker, with their probes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.fake_server import __file__ as PROGRAM
from tests.support.child import start_child
from tests.support.polling import rest

WAIT_S = 60.0


def wait_until(condition: Callable[[], object], what: str, timeout: float = WAIT_S) -> None:
    began = time.monotonic()
    while not condition():
        if time.monotonic() > began + timeout:
            pytest.fail(f"{what} did not come true within {timeout:g} s")
        rest(began)


class ShadowProcess:
    """One engine; it is killed at the end of the ``with`` block if it still runs."""

    def __init__(
        self,
        model: Path,
        directory: Path,
        name: str,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        given = {
            **{"model": str(model), "load_format": "dummy", "port": 0, "log_level": "info"},
            **{"shadow_mode": True, "system_port": 0, "engine_id": name},
            **({} if options.get("shadow_mode") is False else {"failover_dir": str(directory)}),
            **{"exit_grace": 0.0},
            **options,
        }
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115, `__exit__` closes it
        self.process = start_child(
            [sys.executable, PROGRAM, json.dumps(given)],
            env=os.environ | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )

    @cached_property
    def port(self) -> int:
        """The API port; waits until it is bound."""
        assert self.process.stdout is not None
        return int(self.process.stdout.readline().split()[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @cached_property
    def system(self) -> httpx.Client:
        """A client of the system port; waits until it listens."""
        assert self.port
        wait_until(lambda: "system routes at" in self.log() or self.process.poll() is not None, "its port")
        found = re.search(r"system routes at (\S+)", self.log())
        return httpx.Client(base_url=found[1] if found else "", timeout=WAIT_S)

    def __enter__(self) -> ShadowProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        if "system" in self.__dict__:
            self.system.close()
        self._log.close()

    def log(self) -> str:
        return os.pread(self._log.fileno(), 1 << 20, 0).decode()

    def probe(self, name: str) -> tuple[int, dict[str, Any]]:
        """The status and the body of a probe; 0 if nobody answers."""
        with suppress(httpx.TransportError):
            response = self.system.get(f"/{name}")
            return response.status_code, response.json()
        return 0, {}

    @property
    def state(self) -> str:
        return str(self.probe("health")[1].get("state", "gone"))

    def until(self, state: str) -> None:
        wait_until(
            lambda: self.state == state or self.process.poll() is not None, f"the state {state} of {self.url}"
        )
        assert self.state == state, self.log()

    def workers(self) -> list[int]:
        """The process ids of the ranks."""
        pid = self.process.pid
        found = []
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):  # this thread has just ended
                found += map(int, file.read_text().split())
        return sorted(found)

    def listens(self) -> bool:
        """Whether somebody could connect to the API port."""
        with suppress(httpx.TransportError):
            httpx.get(f"{self.url}/version", timeout=WAIT_S)
            return True
        return False

    def generate(self, text: str = "abc", tokens: int = 3) -> str:
        body = {"text": text, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
        return str(httpx.post(f"{self.url}/generate", json=body, timeout=WAIT_S).json()["text"])
