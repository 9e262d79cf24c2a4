"""An engine as far as the lock of its cohort is concerned: a process that does what its parent writes to it.

    python -m tests.failover.lock_holder DIRECTORY COHORT

Each line is a command, which it answers by a line.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from segue.errors import LockLostError
from segue.failover.lock import CohortLock
from tests.support.child import start_child

ROOT = Path(__file__).resolve().parents[2]


class LockHolder:
    """The parent's side of such a process."""

    def __init__(self, directory: Path, cohort: str = "default") -> None:
        command = [sys.executable, "-m", "tests.failover.lock_holder", str(directory), cohort]
        pipe = subprocess.PIPE
        self.process = start_child(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def send(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, command: str) -> str:
        self.send(command)
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def _do(lock: CohortLock, command: str, value: str) -> str:
    match command:
        case "acquire":
            lock.acquire()
            return str(time.monotonic())
        case "wait":
            threading.Thread(target=lock.acquire, daemon=True).start()
            return "waits"
        case "try":
            return str(lock.try_acquire())
        case "claim":
            try:
                return str(lock.claim(f"engine-{os.getpid()}", "http://127.0.0.1:1", int(value)))
            except LockLostError:
                return "lost"
        case "ours":
            return str(lock.is_ours())
        case "release":
            lock.release()
            return "released"
        case "fork":
            if not (child := os.fork()):
                signal.pause()
            return str(child)
        case "claim-for-ever":  # each epoch is written to the pipe once it has been claimed
            while True:
                print(lock.claim("engine", "http://127.0.0.1:1", 0), flush=True)
    raise ValueError(command)


def main() -> None:
    lock = CohortLock(Path(sys.argv[1]), sys.argv[2])
    for line in sys.stdin:
        command, _, value = line.strip().partition(" ")
        print(_do(lock, command, value), flush=True)


if __name__ == "__main__":
    main()
