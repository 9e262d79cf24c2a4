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
import termios
import time
from collections.abc import Callable
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
        """Types once the program has set the terminal up for keys: before, some of it may be lost.

        A program does that again for each line that it reads, so `expect` its prompt before.
        """
        self._wait(self._takes_keys)
        os.write(self._ours, text.encode())

    def interrupt(self) -> None:
        """As Ctrl-C does, once the program waits for a line: Python loses a signal just before it waits."""
        self._wait(self._waits_for_line)
        self.process.send_signal(signal.SIGINT)

    def _takes_keys(self) -> bool:
        flags: int = termios.tcgetattr(self._ours)[3]
        return not flags & termios.ICANON

    def _waits_for_line(self) -> bool:
        """Whether Python's `input` waits, which is a `select` that reads descriptor 0 and writes none."""
        number, *arguments = Path(f"/proc/{self.process.pid}/syscall").read_text().split()
        return number.isdigit() and arguments[0] == "0x1" and arguments[1] != "0x0" and arguments[2] == "0x0"

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, self.output
            self._read(0.01)  # a program whose terminal nobody reads waits for that

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
