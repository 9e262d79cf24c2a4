"""A router finds the engine of a cohort that serves, and its streams go on when another one takes over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.child import start_child
from tests.support.shadows import WAIT_S, ShadowProcess, wait_until

TOKENS = 60
STEP = {"FAKE_STEP_S": "0.02"}
BODY = {"input_ids": [70, 71, 72, 73], "stream": True, "sampling_params": {"max_new_tokens": TOKENS}}
EXPECTED = [70 + index % 4 for index in range(TOKENS)]  # the fake model repeats the prompt


@contextmanager
def routed(directory: Path) -> Iterator[str]:
    """Runs a router that finds engines in a failover directory; yields its URL."""
    command = [sys.executable, "-m", "segue", "router", "--port", "0", "--log-level", "error"]
    command += ["--discovery", "file", "--discovery-target", str(directory)]
    with start_child(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield next(word for word in process.stdout.readline().split() if word.startswith("http://"))
        finally:
            process.kill()


class Stream:
    """A stream through the router, which a thread reads."""

    def __init__(self, url: str) -> None:
        self.events: list[tuple[float, dict[str, Any]]] = []  # each with when it came
        self._thread = threading.Thread(target=self._read, args=(url,))
        self._thread.start()

    @property
    def ids(self) -> list[int]:
        return self.events[-1][1]["output_ids"] if self.events else []

    def result(self) -> list[int]:
        self._thread.join(WAIT_S)
        for (_, earlier), (_, later) in zip(self.events, self.events[1:], strict=False):
            known = earlier["output_ids"]
            assert later["output_ids"][: len(known)] == known, "nothing is lost or repeated"
        assert self.events[-1][1]["meta_info"]["finish_reason"]["type"] == "length"
        return self.ids

    def gap_after(self, moment: float) -> float:
        """The seconds from a moment to the next event."""
        return min(at for at, _ in self.events if at > moment) - moment

    def _read(self, url: str) -> None:
        with httpx.stream("POST", f"{url}/generate", json=BODY, timeout=WAIT_S) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self.events.append((time.monotonic(), json.loads(line[6:])))


def test_streams_go_on_when_another_engine_takes_over(tiny_model: Path, tmp_path: Path) -> None:
    directory, slow_while = tmp_path / "cohort", tmp_path / "slow"
    environment = STEP | {"FAKE_SLOW_WHILE": str(slow_while)}  # no stream ends before its engine does
    with ExitStack() as stack, routed(directory) as url:
        engines = [
            stack.enter_context(ShadowProcess(tiny_model, directory, name, environment))
            for name in ("a", "b", "c", "d")
        ]
        wait_until(
            lambda: sorted(each.state for each in engines) == ["active", *["standby"] * 3], "all engines"
        )
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 200, "the router's readiness")
        for how in ("front", "rank", "hand over"):
            active = next(each for each in engines if each.state == "active")
            slow_while.touch()
            streams = [Stream(url) for _ in range(4)]
            wait_until(lambda found=streams: all(len(stream.ids) > 2 for stream in found), "the first tokens")
            moment = time.monotonic()
            match how:
                case "front":
                    active.process.kill()
                case "rank":
                    os.kill(active.workers()[0], signal.SIGKILL)
                case _:
                    assert active.system.post("/engine/hand_over").status_code == 202
            slow_while.unlink()
            assert [stream.result() for stream in streams] == [EXPECTED] * 4
            gaps = sorted(stream.gap_after(moment) for stream in streams)
            print(f"{how}: the next token after {gaps[0]:.3f} to {gaps[-1]:.3f} s")
            engines.remove(active)
            assert active.process.wait(60) == {"front": -9, "rank": 1, "hand over": 0}[how]
