"""Runs a conversation in the terminal, with an engine in this process or with a server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console

from segue.cli.remote import Remote, RemoteError, message_of
from segue.errors import SegueError

if TYPE_CHECKING:
    from segue.api.engine import Engine

Message = dict[str, str]
HELP = "/help  this list\n/reset forget the conversation\n/exit  leave (also Ctrl-D)\nCtrl-C stops an answer."


class LocalChat:
    """Gets answers from an engine in this process."""

    def __init__(self, engine: Engine, params: dict[str, Any]) -> None:
        """Keep the sampling parameters, which have OpenAI's names, under those of the engine."""
        self._engine = engine
        self._params = {"max_new_tokens" if name == "max_tokens" else name: params[name] for name in params}
        self.model = engine.model_name

    def reply(self, messages: list[Message]) -> Iterator[str]:
        """Return the pieces of the answer to `messages`; raises RemoteError if the model has no tokenizer."""
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise RemoteError(f"{self.model} has no tokenizer, so it cannot chat; use a model that has one")
        ids = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
        return pieces(self._engine.generate(input_ids=ids, sampling_params=self._params, stream=True))


class RemoteChat:
    """Gets answers from an OpenAI-compatible server."""

    def __init__(self, server: Remote, params: dict[str, Any]) -> None:
        self._server = server
        self._params = params
        with server.open("/v1/models") as answer:
            self.model: str = json.load(answer)["data"][0]["id"]

    def reply(self, messages: list[Message]) -> Iterator[str]:
        """Yield the pieces of the answer to `messages`, from the events of the server's stream.

        Reasoning is part of it, within the marks that a local model writes.

        Raises:
            RemoteError: the server reports an error, or its stream ends without the end mark.
        """
        body = {"model": self.model, "messages": messages, "stream": True, **self._params}
        reasons = False
        with self._server.open("/v1/chat/completions", body) as answer:
            for line in answer:
                name, _, data = line.decode().strip().partition(":")
                if name != "data":
                    continue
                if data.strip() == "[DONE]":
                    return
                content = json.loads(data)
                if "error" in content:
                    raise RemoteError(message_of(content))
                for choice in content["choices"]:
                    delta = choice["delta"]
                    if reasoning := delta.get("reasoning_content"):
                        yield reasoning if reasons else f"<think>\n{reasoning}"
                        reasons = True
                    if text := delta.get("content"):
                        yield f"\n</think>\n\n{text}" if reasons else text
                        reasons = False
        raise RemoteError(f"{self._server.url} ended in the middle of its answer; see the server's log")


def pieces(updates: Iterator[dict[str, Any]]) -> Iterator[str]:
    """Yield the text that each update adds; an update holds the whole text so far.

    Leaving the loop early closes ``updates``, which aborts the request.
    """
    shown = 0
    try:
        for update in updates:
            text = update["text"]
            yield text[shown:]
            shown = len(text)
    finally:
        updates.close()  # type: ignore[attr-defined]


def converse(chat: LocalChat | RemoteChat, system: str | None) -> None:
    """Read messages and print their answers until /exit or the end of the input."""
    console = Console(highlight=False)
    console.print(f"[dim]{chat.model} — /help lists the commands[/dim]")
    start: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    messages = list(start)
    while True:
        try:
            line = console.input("[bold cyan]you>[/bold cyan] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if line in ("/exit", "/quit"):
            return
        if line == "/help":
            console.print(HELP, markup=False)
        elif line == "/reset":
            messages = list(start)
            console.print("[dim]forgotten[/dim]")
        elif line.startswith("/"):
            console.print(f"unknown command {line}; /help lists them", markup=False)
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                answer = _show(console, chat.reply(messages))
            except SegueError as error:
                console.print(f"\n{error.message}", style="red", markup=False)
                messages.pop()  # the next message must not follow one without an answer
            else:
                messages.append({"role": "assistant", "content": answer})


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
