"""Runs `segue cluster` as a process, and checks that nothing is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from segue.launch.run_dir import remove_orphans
from tests.conftest import WaitUntil
from tests.support.child import start_child

KEY = {"authorization": "Bearer users-key"}


@dataclass
class Clustered:
    """A running ``segue cluster``."""

    process: subprocess.Popen[str]
    status: str = ""  # its line on standard output
    log: list[str] = field(default_factory=list)  # its standard error

    @property
    def url(self) -> str:
        return next(word for word in self.status.split() if word.startswith("http://"))

    def generate(self, url: str | None = None, *, tokens: int = 8, **fields: Any) -> httpx.Response:
        body = {"text": "Once upon", "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
        return httpx.post(f"{url or self.url}/generate", json=body | fields, headers=KEY, timeout=60)

    def serving(self) -> int:
        try:
            workers = httpx.get(f"{self.url}/workers", headers=KEY, timeout=60).json()["workers"]
            return sum(worker["serves"] for worker in workers)
        except httpx.HTTPError:  # the router is not there
            return 0

    @contextmanager
    def starting_nothing(self) -> Iterator[None]:
        """For the block, a child that ends is not started again: what its end leads to stays to be seen."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def children(self, word: str) -> dict[int, list[str]]:
        """The children that run this command, with their command lines."""
        found = {pid: words for pid, words in descendants(self.process.pid).items() if word in words}
        return dict(sorted(found.items()))


def descendants(root: int) -> dict[int, list[str]]:
    """The processes below this one, with their command lines."""
    found: dict[int, list[str]] = {}
    for file in Path(f"/proc/{root}/task").glob("*/children"):
        with suppress(OSError):  # it has just ended
            for pid in map(int, file.read_text().split()):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                found |= descendants(pid)
    return found


def shared_memory() -> set[Path]:
    """All files in shared memory, except the semaphores that Python makes and removes all the time."""
    return {file for file in Path("/dev/shm").iterdir() if not file.name.startswith("sem.mp-")}


def is_used(file: Path) -> bool:
    """Whether a process has a file open or mapped, or it is gone: then it is another test's."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if str(file) in (process / "maps").read_text():
                return True
            if any(os.readlink(each) == str(file) for each in (process / "fd").iterdir()):
                return True
    return not file.exists()


@contextmanager
def clustered(
    tmp_path: Path, model: Path | None, wait_until: WaitUntil, *options: str
) -> Iterator[Clustered]:
    """Runs a cluster until the block ends, and checks that nothing is left of it then.

    ``model``: a directory with a model without weights; None: the bundled one.
    """
    directory = tmp_path / "t"
    directory.mkdir()
    words = ["--port", "0", "--device", "cpu", *options]
    if model is not None:
        words += ["--model", str(model), "--load-format", "dummy"]
    memory = shared_memory()
    process = start_child(
        [sys.executable, "-m", "segue", "cluster", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(directory), "SEGUE_API_KEY": "users-key"},
    )
    found = Clustered(process)
    assert process.stdout is not None and process.stderr is not None
    reader = threading.Thread(target=lambda: found.log.extend(process.stderr or []))
    reader.start()
    pids: set[int] = set()
    try:
        found.status = process.stdout.readline()
        assert "Ready at http://" in found.status, found.log
        pids |= descendants(process.pid).keys()
        yield found
    finally:
        pids |= descendants(process.pid).keys()
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(60)
        reader.join(60)
        process.stdout.close()
        process.stderr.close()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), what="no process is left")
    remove_orphans(directory)  # of engines that were killed, as the next engine does
    assert list(directory.iterdir()) == []
    assert [file for file in shared_memory() - memory if not is_used(file)] == []
