"""Conversations in the terminal: their commands, lines, and interruptions."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from segue.cli.chat import Conversation, read_message
from segue.errors import InvalidRequestError
from tests.server.live import LiveServer
from tests.support.child import start_child


def test_commands_change_what_is_asked() -> None:
    talk = Conversation("Be brief.", {"temperature": 0.5})
    talk.keep("Hi", "Hello")
    assert [each["content"] for each in talk.ask("What?").messages] == ["Be brief.", "Hi", "Hello", "What?"]
    assert talk.command("/set top_k=3") == "top_k = 3"
    assert talk.ask("").sampling == {"temperature": 0.5, "top_k": 3}
    talk.command("/set temperature=")
    assert talk.command("/set").startswith("top_k = 3\ndefault: max_tokens, ")
    assert talk.command("/system Be kind.") == "the system message is set"
    assert talk.command("/system") == "Be kind."
    talk.command("/reset")
    assert [each["content"] for each in talk.ask("Again").messages] == ["Be kind.", "Again"]
    talk.command("/system -")
    assert [each["role"] for each in talk.ask("Again").messages] == ["user"]


@pytest.mark.parametrize("line", ["/set top_k=x", "/set top_k", "/set heat=1", "/rest", "/reset now"])
def test_a_wrong_command_is_an_error_and_changes_nothing(line: str) -> None:
    talk = Conversation(None, {"top_k": 1})
    talk.keep("Hi", "Hello")
    before = talk.ask("x")
    with pytest.raises(InvalidRequestError):
        talk.command(line)
    assert talk.ask("x") == before


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["one"], "one"),
        (["one\\", "two\\", "three"], "one\ntwo\nthree"),
        (['"""one"""'], "one"),
        (['"""one', "", ' two"""'], "one\n\n two"),
        (['"""', "one", '"""'], "\none\n"),
    ],
)
def test_a_message_may_have_several_lines(lines: list[str], expected: str) -> None:
    left = iter(lines)
    assert read_message(lambda prompt: next(left)) == expected
    assert list(left) == []


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, *words: str) -> None:
        self._ours, theirs = pty.openpty()
        self.process: subprocess.Popen[bytes] = start_child(
            [sys.executable, "-m", "segue", *words],
            env=os.environ | {"TERM": "xterm", "PYTHONWARNINGS": ""},
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


def test_ctrl_c_stops_an_answer_and_twice_at_the_prompt_it_leaves(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.02")
    with LiveServer(tiny_model) as server:
        terminal = Terminal("chat", "--url", server.url)
        try:
            terminal.expect("you> ")
            terminal.type("first\\\nsecond\n")
            terminal.expect(r"(?s)user\s+first\s+second")  # the fake worker repeats the prompt
            terminal.interrupt(r"\(stopped\)")
            terminal.expect("you> ")
            terminal.type("half a message")
            terminal.expect("half a message")
            terminal.interrupt(r"^\s+you> ")  # without the hint: only the line is dropped
            terminal.type("/set max_tokens=3\n")
            terminal.expect("max_tokens = 3")
            terminal.expect("you> ")
            terminal.interrupt("Ctrl-C again leaves")
            terminal.expect("you> ")
            terminal.interrupt("$")
            assert terminal.wait() == 0
        finally:
            terminal.close()
        server.assert_nothing_left()
