"""What the commands ask for text: an engine in this process, or an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from segue.cli.remote import Remote, RemoteError, message_of
from segue.errors import InvalidRequestError

if TYPE_CHECKING:
    from segue.api.engine import Engine

Message = Mapping[str, Any]
# The longest time, in seconds, that a server may take for an answer which is not streamed.
ANSWER_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextQuery:
    """A text to continue or, without one, a conversation to answer."""

    prompt: str | None = None
    messages: Sequence[Message] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)  # with OpenAI's names; checked


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A whole answer; the numbers of tokens are None where a server does not report them."""

    text: str
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None


class LocalModel:
    """An engine in this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.name = engine.model_name

    def stream(self, ask: TextQuery) -> Iterator[str]:
        """Return the pieces of the answer; closing the iterator aborts the request.

        Raises:
            InvalidRequestError: the model cannot answer it, as for messages without a chat template.
        """
        return pieces(self._engine.generate(**self._arguments(ask), stream=True))

    def complete(self, ask: TextQuery) -> Answered:
        """Return the whole answer; raises as :meth:`stream`, which any number of threads may call."""
        reply = self._engine.generate(**self._arguments(ask))
        meta = reply["meta_info"]
        return Answered(
            text=reply["text"],
            finish_reason=meta["finish_reason"]["type"],
            prompt_tokens=meta["prompt_tokens"],
            completion_tokens=meta["completion_tokens"],
        )

    def _arguments(self, ask: TextQuery) -> dict[str, Any]:
        """Return the arguments of ``Engine.generate``; without a ``max_tokens`` there is no such limit."""
        from segue.api.native import NAMES
        from segue.api.openai.requests import ChatCompletionRequest, messages_of
        from segue.api.validation import parse

        names = NAMES | {"include_stop_str_in_output": NAMES["keep_stop"]}
        params = {"max_new_tokens": None} | {
            names.get(name, name): ask.sampling[name] for name in ask.sampling
        }
        if ask.prompt is not None:
            return {"prompt": ask.prompt, "sampling_params": params}
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise InvalidRequestError(
                f"{self.name} has no tokenizer, so it cannot chat; use a model that has one"
            )
        messages = asyncio.run(messages_of(parse(ChatCompletionRequest, {"messages": ask.messages}).messages))
        ids = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
        return {"input_ids": ids, "sampling_params": params}


class RemoteModel:
    """The first model of an OpenAI-compatible server."""

    def __init__(self, server: Remote) -> None:
        """TextQuery the server for its models; raises RemoteError if it does not answer, or has none."""
        self._server = server
        with server.open("/v1/models") as answer:
            self.name: str = json.load(answer)["data"][0]["id"]

    def stream(self, ask: TextQuery) -> Iterator[str]:
        """Yield the pieces of the answer, from the events of the server's stream.

        Reasoning is part of it, within the marks that a local model writes.

        Raises:
            RemoteError: the server reports an error, or its stream ends without the end mark.
        """
        path, body = self._request(ask)
        reasons = False
        with self._server.open(path, body | {"stream": True}) as answer:
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
                    delta = {"content": choice["text"]} if ask.prompt is not None else choice["delta"]
                    if reasoning := delta.get("reasoning_content"):
                        yield reasoning if reasons else f"<think>\n{reasoning}"
                        reasons = True
                    if text := delta.get("content"):
                        yield f"\n</think>\n\n{text}" if reasons else text
                        reasons = False
        raise RemoteError(f"{self._server.url} ended in the middle of its answer; see the server's log")

    def complete(self, ask: TextQuery) -> Answered:
        """Return the whole answer; raises RemoteError. Any number of threads may call this."""
        path, body = self._request(ask)
        with self._server.open(path, body, timeout=ANSWER_S) as answer:
            content = json.load(answer)
            choice, usage = content["choices"][0], content.get("usage") or {}
            text = choice["text"] if ask.prompt is not None else choice["message"]["content"]
            return Answered(
                text=text or "",
                finish_reason=choice.get("finish_reason"),
                prompt_tokens=usage.get("prompt_tokens"),
                completion_tokens=usage.get("completion_tokens"),
            )

    def _request(self, ask: TextQuery) -> tuple[str, dict[str, Any]]:
        """Return the path and the body of the request."""
        body = {"model": self.name, **ask.sampling}
        if ask.prompt is not None:
            return "/v1/completions", body | {"prompt": ask.prompt}
        return "/v1/chat/completions", body | {"messages": list(ask.messages)}


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
