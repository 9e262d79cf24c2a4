"""A command of Segue on a pseudo-terminal."""

from __future__ import annotations

import codecs
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

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
        self._decode = codecs.getincrementaldecoder("utf-8")().decode  # a read may end within a character
        self.output = ""

    def type(self, text: str) -> None:
        """Types once the program waits: what comes while it sets the terminal up may be dropped."""
        self._settle()
        os.write(self._ours, text.encode())

    def interrupt(self) -> None:
        """As Ctrl-C does, once the program waits: Python's `input` loses a signal just before it waits."""
        self._settle()
        self.process.send_signal(signal.SIGINT)

    def _settle(self) -> None:
        """Waits until the program waits."""
        deadline, num_waits = time.monotonic() + 60, 0
        while num_waits < 5:
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
            num_waits = num_waits + 1 if state == "S" else 0
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def expect(self, pattern: str) -> None:
        """Waits until the output has the pattern, and forgets the output up to its end."""
        deadline = time.monotonic() + 60
        while not (match := re.search(pattern, self.output)):
            assert self._read(max(0.0, deadline - time.monotonic())), self.output
        self.output = self.output[match.end() :]

    def end(self) -> int:
        """Waits for the end of the program, and returns its exit code.

        Its output is read meanwhile: a program whose terminal nobody reads waits for that.
        """
        deadline = time.monotonic() + 60
        with suppress(OSError):  # nobody has the other side open any more
            while self.process.poll() is None:
                assert time.monotonic() < deadline, self.output
                self._read(0.02)
        return self.process.wait(60)

    def _read(self, seconds: float) -> bool:
        """Takes what comes within this time; returns whether something has come."""
        ready, _, _ = select.select([self._ours], [], [], seconds)
        if ready:
            new = self._decode(os.read(self._ours, 4096))
            self.output = re.sub(r"\x1b\[[\d;?]*[a-z]", "", self.output + new)
        return bool(ready)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
