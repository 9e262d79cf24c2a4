"""Runs a conversation in the terminal."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console

from segue.cli.backends import LocalModel, Message, RemoteModel, TextQuery
from segue.cli.sampling import SAMPLING_FIELDS, check_sampling, nearest, parse_setting
from segue.errors import InvalidRequestError, SegueError

HELP = '''\
/help            this list
/reset           forget the conversation; the system message and the settings stay
/system TEXT     set the system message; "/system -" removes it, "/system" shows it
/set NAME=VALUE  set a sampling field; "/set NAME=" takes the default, "/set" shows all
/quit            leave (also /exit and Ctrl-D)
Ctrl-C stops an answer; twice at an empty prompt it leaves.
A message of several lines stands between """ and """, or has \\ at the end of each line but the last.'''
COMMANDS = ("/help", "/reset", "/system", "/set", "/quit", "/exit")
QUOTES = '"""'
PROMPT, MORE = "you> ", "...> "


class Conversation:
    """The messages so far, and the settings of the next answer."""

    def __init__(self, system: str | None, sampling: Mapping[str, Any]) -> None:
        """Begin with a system message or none; raises InvalidRequestError for a wrong sampling field."""
        check_sampling(sampling)
        self._system = system
        self._turns: list[Message] = []
        self._sampling = dict(sampling)

    def ask(self, text: str) -> TextQuery:
        """Return what is to be answered: the conversation with one more message, which is not kept yet."""
        system: list[Message] = [] if self._system is None else [{"role": "system", "content": self._system}]
        messages = [*system, *self._turns, {"role": "user", "content": text}]
        return TextQuery(messages=messages, sampling=dict(self._sampling))

    def keep(self, text: str, answer: str) -> None:
        """Add a message and its answer to the conversation."""
        self._turns += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def command(self, line: str) -> str:
        """Carry out a command other than the one that leaves, and return what to show.

        Reasoning is part of it, within the marks that a local model writes.

        Raises:
            InvalidRequestError: the command is unknown, or a setting breaks its rule, and nothing changes.
        """
        name, _, rest = line.partition(" ")
        match name, rest.strip():
            case "/help", "":
                return HELP
            case "/reset", "":
                self._turns.clear()
                return "forgotten"
            case "/system", "":
                return "there is no system message" if self._system is None else self._system
            case "/system", text:
                self._system = None if text == "-" else text
                return "the system message is " + ("removed" if text == "-" else "set")
            case "/set", "":
                return self._settings()
            case "/set", text:
                return self._set(*parse_setting(text))
            case _:
                hint = (
                    "it takes no text" if name in COMMANDS else f"/help lists them{nearest(name, COMMANDS)}"
                )
                raise InvalidRequestError(f"unknown command {line}; {hint}")

    def _set(self, name: str, value: Any) -> str:
        changed = {key: each for key, each in self._sampling.items() if key != name}
        check_sampling(changed | {name: value})
        self._sampling = changed if value is None else changed | {name: value}
        return f"{name} has its default" if value is None else f"{name} = {json.dumps(value)}"

    def _settings(self) -> str:
        """Return the fields that are set, and the names of the others."""
        lines = [f"{name} = {json.dumps(value)}" for name, value in self._sampling.items()]
        others = ", ".join(name for name in SAMPLING_FIELDS if name not in self._sampling)
        return "\n".join([*lines, f"default: {others}"])


def converse(model: LocalModel | RemoteModel, conversation: Conversation) -> None:
    """Read messages and print their answers until /quit, the end of the input, or Ctrl-C twice."""
    console = Console(highlight=False)
    console.print(f"[dim]{model.name} — /help lists the commands[/dim]")
    line_of = _line_reader()
    was_interrupted = False
    while True:
        try:
            text = read_message(line_of).strip()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print()
            if was_interrupted and not _typed():
                return
            was_interrupted = not _typed()
            if was_interrupted:
                console.print("[dim]Ctrl-C again leaves[/dim]")
            continue
        was_interrupted = False
        if text in ("/quit", "/exit"):
            return
        try:
            if text.startswith("/"):
                console.print(conversation.command(text), style="dim", markup=False)
            elif text and (answer := _show(console, model.stream(conversation.ask(text)))):
                conversation.keep(text, answer)
        except SegueError as error:
            # The message is not kept: the next one must not follow one without an answer.
            console.print(f"\n{error.message}", style="red", markup=False)


def read_message(line_of: Callable[[str], str]) -> str:
    r"""Return a message of one line, or of several: between triple quotes, or with ``\`` at a line's end.

    ``line_of`` shows a prompt and returns a line; what it raises, as at the end of the input, ends this too.
    """
    line = line_of(PROMPT)
    if line.lstrip().startswith(QUOTES):
        lines = [line.lstrip().removeprefix(QUOTES)]
        while not lines[-1].rstrip().endswith(QUOTES):
            lines.append(line_of(MORE))
        return "\n".join(lines).rstrip().removesuffix(QUOTES)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        lines.append(line_of(MORE))
    return "\n".join(lines)


def _line_reader() -> Callable[[str], str]:
    """Return a function that shows a prompt and reads a line; on a terminal it can be edited."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return input
    try:
        import readline  # noqa: F401, `input` uses it: arrow keys, the lines before, and pasted lines
    except ImportError:  # a Python without it
        return input
    # Between \1 and \2 is what takes no place on the line.
    return lambda prompt: input(f"\1\x1b[1;36m\2{prompt}\1\x1b[0m\2")


def _typed() -> str:
    """Return what stood on the line when Ctrl-C dropped it, as far as that is known."""
    readline = sys.modules.get("readline")
    return "" if readline is None else str(readline.get_line_buffer())


def _show(console: Console, answer: Iterator[str]) -> str:
    """Print an answer piece by piece and return its text; Ctrl-C ends the answer early."""
    parts: list[str] = []
    began = time.monotonic()
    try:
        for piece in answer:
            parts.append(piece)
            console.out(piece, end="", highlight=False)
    except KeyboardInterrupt:
        console.print(" [dim](stopped)[/dim]", end="")
    finally:
        answer.close()  # type: ignore[attr-defined]
    console.print(f"\n[dim]{time.monotonic() - began:.1f} s[/dim]")
    return "".join(parts)
