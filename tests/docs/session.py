"""Runs the blocks of a page as a reader would: one after the other, in one folder, against real servers.

Servers run until another block starts servers. They get free ports in place of those that the page names, and
`/run/segue` is a folder of the test.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Block
from tests.docs.shell import statements, words_of
from tests.support.child import start_child

START_S, RUN_S, STOP_S = 120.0, 600.0, 20.0
# The port that each kind of server has without an option.
SERVERS = {"serve": 30000, "router": 30000, "cluster": 8000, "trainer": 8990, "gms serve": 0}
PORT = re.compile(r"(:|port[ \":=]+)(\d{4,5})\b")
CONTROL = re.compile(r"^segue (pause|continue|abort|flush|top)\b", re.MULTILINE)
BOOTSTRAP_PORT = 8998
SHIMS = {
    "segue": '{python} -m segue "$@"',
    "python": '{python} "$@"',
    "python3": '{python} "$@"',
    "curl": 'curl --fail-with-body --noproxy "*" "$@"',
}


class Server:
    """A command that goes on until it is stopped."""

    def __init__(self, words: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
        number = len(list(folder.glob("server-*.log")))
        self._log = folder / f"server-{number}.log"
        # What the processes of a cluster say goes to standard error; the cluster's own line does not.
        self._output = self._log if words[0] == "gms" else folder / f"server-{number}.out"
        command = [sys.executable, "-m", "segue", *words]
        with self._log.open("ab") as log, self._output.open("ab") as output:
            self._process = start_child(command, stdout=output, stderr=log, cwd=folder, env=environment)
        # An engine that stands by never says that it is ready.
        self._probe = _option(words, "--system-port") if "--shadow-mode" in words else None

    def wait(self) -> None:
        """Waits until it is ready, or stands by with its model loaded."""
        deadline = time.monotonic() + START_S
        while not self._is_ready():
            text = self._log.read_text()
            if self._process.poll() is not None:
                pytest.fail(f"a server ended with exit code {self._process.returncode}:\n{text[-4000:]}")
            assert time.monotonic() < deadline, f"a server is not ready after {START_S:g} s:\n{text[-4000:]}"
            time.sleep(0.05)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        self._process.wait(STOP_S)

    def _is_ready(self) -> bool:
        if self._probe is None:
            return "Ready" in self._output.read_text()
        with contextlib.suppress(OSError, urllib.error.HTTPError):
            return urllib.request.urlopen(f"http://127.0.0.1:{self._probe}/startup", timeout=5).status == 200
        return False


class PageSession:
    """What the blocks of one page share: a folder, ports, and the servers that the last one has started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._servers: list[Server] = []
        self._ports: dict[int, int] = {}
        self._link_repository()
        programs = folder / "bin"
        programs.mkdir()
        for name, command in SHIMS.items():
            program = programs / name
            run = command.format(python=shlex.quote(sys.executable))
            program.write_text(f"#!/bin/sh\nPATH={shlex.quote(os.environ['PATH'])}\nexec {run}\n")
            program.chmod(0o755)
        self._environment = os.environ | {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "SEGUE_DRAIN_S": "0",
            "NO_COLOR": "1",
        }

    def port(self, written: int) -> int:
        """A free port, the same for each time that the page names this one."""
        if written not in self._ports:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self._ports[written] = probe.getsockname()[1]
        return self._ports[written]

    def run(self, block: Block, prelude: str = "") -> None:
        """Run a block; the text ``prelude`` stands before a Python program."""
        if block.language == "python":
            program = self.folder / f"{block.page.stem}-{block.line}.py"
            program.write_text(prelude + self.here(block.text))
            self._command(["python", program.name], str(block))
            return
        script = self.here(block.script)
        parts = [(statement, _server(statement)) for statement in statements(script)]
        if any(words for _, words in parts):
            self.stop()
        commands = ""
        for statement, words in parts:
            if words is None:
                commands += statement
                continue
            self._script(commands, str(block))
            commands = ""
            self.start(words)
        self.wait()
        self._script(commands, str(block))

    def start(self, words: Sequence[str]) -> None:
        """Start a server; `wait` waits until all are ready."""
        kind = next(each for each in SERVERS if list(words)[: each.count(" ") + 1] == each.split())
        if (port := SERVERS[kind]) and _option(words, "--port") is None and "--config" not in words:
            words = [*words, "--port", str(self.port(port))]
        if _option(words, "--role") == "prefill":
            words = [*words, "--disaggregation-bootstrap-port", str(self.port(BOOTSTRAP_PORT))]
        self._servers.append(Server(words, self.folder, self._environment))

    def wait(self) -> None:
        for server in self._servers:
            server.wait()

    def stop(self) -> None:
        while self._servers:
            self._servers.pop().stop()

    @property
    def serves(self) -> bool:
        return bool(self._servers)

    def here(self, text: str) -> str:
        """A text of the page with the ports and folders of this session."""
        text = PORT.sub(lambda found: f"{found[1]}{self.port(int(found[2]))}", text)
        return text.replace("/run/segue", str(self.folder / "run")).replace(".venv/bin/", "")

    def _link_repository(self) -> None:
        """Make what commands find in a checkout: benchmarks, and examples with the ports of this session."""
        for name in ("bench", "tests"):
            (self.folder / name).symlink_to(ROOT / name)
        (self.folder / "examples").mkdir()
        for example in (ROOT / "examples").glob("*.py"):
            (self.folder / "examples" / example.name).write_text(self.here(example.read_text()))

    def _script(self, text: str, where: str) -> None:
        if text.strip():
            self._command(["bash", "-euo", "pipefail", "-c", f"{text}\nwait"], where)

    def _command(self, command: list[str], where: str) -> None:
        environment = dict(self._environment)
        if CONTROL.search(command[-1]):
            environment["SEGUE_URL"] = f"http://127.0.0.1:{self.port(30000)}"
        program = [str(self.folder / "bin" / "python"), *command[1:]] if command[0] == "python" else command
        done = subprocess.run(
            program,
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_S,
        )
        assert done.returncode == 0, f"{where}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def needs_server(block: Block) -> bool:
    """Whether a block asks a server at the port of `segue serve`, and starts none."""
    return ":30000" in block.text or (block.language == "bash" and bool(CONTROL.search(block.text)))


def _server(statement: str) -> list[str] | None:
    """The words behind `segue` of a statement that starts a server; None for all others."""
    for words in words_of(statement):
        if words[0] == "segue" and "--help" not in words:
            for kind in SERVERS:
                if words[1 : 2 + kind.count(" ")] == kind.split():
                    return words[1:]
    return None


def _option(words: Sequence[str], name: str) -> str | None:
    return dict(itertools.pairwise(words)).get(name)
