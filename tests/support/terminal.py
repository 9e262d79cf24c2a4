"""A command of Segue on a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

from tests.support.child import start_child


class Terminal:
    """Types to a command, and reads what it writes."""

    def __init__(self, *words: str) -> None:
        self._ours, theirs = pty.openpty()
        self.process: subprocess.Popen[bytes] = start_child(
            [sys.executable, "-m", "segue", *words],
            env=os.environ | {"TERM": "xterm", "COLUMNS": "150", "LINES": "20", "PYTHONWARNINGS": ""},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        self.output = ""

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def interrupt(self, pattern: str) -> None:
        """As Ctrl-C does, and waits for what it makes the program write.

        Python's `input` loses a signal between the prompt and the wait for a key, so it is repeated.
        """
        while True:
            self.process.send_signal(signal.SIGINT)
            try:
                return self.expect(pattern, timeout_s=1)
            except TimeoutError:
                assert self.process.poll() is None

    def expect(self, pattern: str, timeout_s: float = 30) -> None:
        """Waits until the output has the pattern, and forgets the output up to its end."""
        deadline = time.monotonic() + timeout_s
        while not (match := re.search(pattern, self.output)):
            ready, _, _ = select.select([self._ours], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(self.output)
            self.output += re.sub(r"\x1b\[[\d;?]*[a-z]", "", os.read(self._ours, 4096).decode())
        self.output = self.output[match.end() :]

    def wait(self) -> int:
        """Returns the exit code, after further signals if one was lost."""
        for _ in range(3):
            try:
                return self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.send_signal(signal.SIGINT)
        raise TimeoutError(self.output)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
