"""Conversations in the terminal: their commands, lines, and interruptions."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from segue.cli import chat
from segue.cli.backends import TextQuery
from segue.cli.chat import Conversation, read_message
from segue.errors import InvalidRequestError
from tests.server.live import LiveServer
from tests.support.terminal import Terminal


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


@pytest.mark.slow  # a server and a command: the next test is the short form
def test_ctrl_c_stops_an_answer_and_twice_at_the_prompt_it_leaves(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_STEP_S", "0.1")
    with LiveServer(tiny_model) as server:
        terminal = Terminal("chat", "--url", server.url)
        try:
            terminal.expect("you> ")
            terminal.type("first\\\n")
            terminal.expect("[.]{3}> ")
            terminal.type("second\n")
            terminal.expect(r"(?s)user\s+first\s+second")  # the fake worker repeats the prompt
            terminal.process.send_signal(signal.SIGINT)  # in the middle of the answer
            terminal.expect(r"\(stopped\)")
            terminal.expect("you> ")
            terminal.type("half a message")
            terminal.expect("half a message")
            terminal.interrupt()
            terminal.expect(r"^\s+you> ")  # without the hint: only the line is dropped
            terminal.type("/set max_tokens=3\n")
            terminal.expect("max_tokens = 3")
            terminal.expect("you> ")
            terminal.interrupt()
            terminal.expect("Ctrl-C again leaves")
            terminal.expect("you> ")
            terminal.interrupt()
            assert terminal.end() == 0
        finally:
            terminal.close()
        server.assert_nothing_left()


class Interrupted:
    """A model whose answers are stopped by Ctrl-C, the first one before it has begun."""

    name = "some-model"

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def stream(self, query: TextQuery) -> Iterator[str]:
        self.asked.append([each["content"] for each in query.messages])
        if len(self.asked) > 1:
            yield "begun"
        raise KeyboardInterrupt


def test_ctrl_c_stops_an_answer_and_leaves_only_at_the_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ctrl_c = KeyboardInterrupt()
    lines = iter(["one", "two", ctrl_c, "three", ctrl_c, ctrl_c, "never"])

    def line_of(prompt: str) -> str:
        line = next(lines)
        if isinstance(line, KeyboardInterrupt):
            raise line
        return line

    monkeypatch.setattr(chat, "_line_reader", lambda: line_of)
    monkeypatch.setattr(chat, "_typed", lambda: "")
    model: Any = Interrupted()
    chat.converse(model, Conversation(None, {}))
    assert model.asked == [["one"], ["two"], ["two", "begun", "three"]]
    assert next(lines) == "never"
    assert capsys.readouterr().out.count("Ctrl-C again leaves") == 2
