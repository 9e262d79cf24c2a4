"""An engine that was stopped and replaced goes on: nothing of it reaches a client, and it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.shadows import WAIT_S, ShadowProcess, wait_until

TOKENS = 100
BODY = {"input_ids": [70, 71, 72, 73], "stream": True, "sampling_params": {"max_new_tokens": TOKENS}}
EXPECTED = [70 + index % 4 for index in range(TOKENS)]  # the fake model repeats the prompt


@contextmanager
def routed(directory: Path) -> Iterator[str]:
    """Runs a router that finds engines in a failover directory; yields its URL."""
    command = [sys.executable, "-m", "segue", "router", "--port", "0", "--log-level", "error"]
    command += ["--discovery", "file", "--discovery-target", str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield next(word for word in process.stdout.readline().split() if word.startswith("http://"))
        finally:
            process.kill()


class ReadStream:
    """A stream that a thread reads."""

    def __init__(self, url: str) -> None:
        self.events: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._read, args=(url,))
        self._thread.start()

    @property
    def ids(self) -> list[int]:
        return list(self.events[-1]["output_ids"]) if self.events else []

    def result(self) -> list[int]:
        self._thread.join(WAIT_S)
        lengths = [len(event["output_ids"]) for event in self.events]
        assert lengths == sorted(set(lengths)), "no token comes twice"
        return self.ids

    def _read(self, url: str) -> None:
        with httpx.stream("POST", f"{url}/generate", json=BODY, timeout=WAIT_S) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self.events.append(json.loads(line[6:]))


def workers_of(router: str) -> list[str]:
    return [each["url"] for each in httpx.get(f"{router}/workers").json()["workers"]]


def test_a_stopped_engine_that_was_replaced_adds_nothing_and_ends(tiny_model: Path, tmp_path: Path) -> None:
    directory, step = tmp_path / "cohort", {"FAKE_STEP_S": "0.02"}
    with routed(directory) as url, ShadowProcess(tiny_model, directory, "a", step) as old:
        old.until("active")
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 200, "the router's readiness")
        streams = [ReadStream(url) for _ in range(3)]
        wait_until(lambda: all(len(stream.ids) > 5 for stream in streams), "the first tokens")
        old.process.send_signal(signal.SIGSTOP)
        (directory / "default.lock").unlink()  # a stopped engine has its lock; now another one can have one
        before = [len(stream.ids) for stream in streams]
        with ShadowProcess(tiny_model, directory, "b", step) as new:
            new.until("active")
            assert new.probe("health")[1]["epoch"] == 2
            wait_until(
                lambda: all(len(stream.ids) > num for stream, num in zip(streams, before, strict=True)),
                "the streams go on",
            )
            old.process.send_signal(signal.SIGCONT)
            late = ReadStream(url)
            assert [stream.result() for stream in (*streams, late)] == [EXPECTED] * 4
            assert old.process.wait(10) != 0, "it looks at its lock, and ends"
            wait_until(lambda: workers_of(url) == [new.url], "the router has forgotten it")
