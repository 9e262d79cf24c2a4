"""OpenAI's answers: whole, and as the chunks of a stream.

A dialect has what differs between chat completions and completions. Each chunk of a stream has one choice;
what it adds is its delta. Deltas are bytes of JSON, because chunks are put together from encoded parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from segue.api.openai.requests import Wanted
from segue.frontend.detokenizer import TokenTable
from segue.frontend.request import LOWEST_LOGPROB, Output
from segue.messages.requests import Finished

encode = msgspec.json.Encoder().encode


def usage(ends: Sequence[Finished]) -> dict[str, Any]:
    """Return ``usage``: the tokens of all choices, of which ``ends`` are the ends."""
    prompt, completion = sum(end.prompt_tokens for end in ends), sum(end.num_tokens for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in ends)},
    }


@dataclass(frozen=True, slots=True)
class ChatDialect:
    """The answers of ``/v1/chat/completions``."""

    _table: TokenTable

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def content(self, text: str) -> dict[str, Any]:
        """Return the part of a finished choice that has its text."""
        return {"message": {"role": "assistant", "content": text}}

    first_delta = b'{"role":"assistant","content":""}'
    last_delta = b"{}"
    delta_name = b'"delta":'

    def delta(self, text: str) -> bytes:
        """Return what a chunk adds to a choice, as JSON."""
        return b'{"content":' + encode(text) + b"}"

    def logprobs(self, output: Output) -> dict[str, Any]:
        """Return ``logprobs``: each token of the output with its text, its bytes and the likeliest others."""
        return {
            "content": [
                self._entry(entry.token, entry.logprob)
                | {"top_logprobs": [self._entry(token, logprob) for token, logprob in entry.top]}
                for entry in output.logprobs
            ],
            "refusal": None,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        """Return one token with its text, its log-probability and its bytes."""
        return {
            "token": self._table.text(token),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(self._table.tokens[token]),
        }


@dataclass(frozen=True, slots=True)
class CompletionDialect:
    """The answers of ``/v1/completions``. A stream has no first chunk of its own, as there is no role."""

    _table: TokenTable

    object = "text_completion"
    chunk_object = "text_completion"

    def content(self, text: str) -> dict[str, Any]:
        """Return the part of a finished choice that has its text."""
        return {"text": text}

    first_delta = None
    last_delta = b'""'
    delta_name = b'"text":'

    def delta(self, text: str) -> bytes:
        """Return what a chunk adds to a choice, as JSON."""
        return encode(text)

    def logprobs(self, output: Output) -> dict[str, Any]:
        """Return ``logprobs`` in the form of completions: one list per fact, with an item per token.

        Tokens of equal text share an entry of ``top_logprobs``, since that is an object by text.
        """
        text = self._table.text
        return {
            "tokens": [text(entry.token) for entry in output.logprobs],
            "token_logprobs": [max(entry.logprob, LOWEST_LOGPROB) for entry in output.logprobs],
            "top_logprobs": [
                {text(token): max(logprob, LOWEST_LOGPROB) for token, logprob in entry.top} or None
                for entry in output.logprobs
            ],
            "text_offset": output.offsets,
        }


Dialect = ChatDialect | CompletionDialect


def choice(dialect: Dialect, index: int, output: Output, logprobs: bool) -> dict[str, Any]:
    """Return one entry of ``choices``, from a finished output; ``logprobs``: whether the call wants them."""
    assert output.end is not None
    return {
        "index": index,
        **dialect.content(output.text),
        "logprobs": dialect.logprobs(output) if logprobs else None,
        "finish_reason": output.end.client_reason,
    }


class Chunks:
    """Encodes a stream's events; what does not change is encoded once."""

    def __init__(self, dialect: Dialect, wanted: Wanted) -> None:
        """Encode what every chunk of the call begins and ends with."""
        self._dialect = dialect
        self._logprobs = wanted.has_logprobs
        self._usage = wanted.usage_in_stream
        # The client has the first chunk already where a request begins with outputs.
        self._begun = {
            index
            for index, request in enumerate(wanted.requests)
            if request.outputs or request.output_end is not None
        }
        self._head = b"data: " + encode(wanted.envelope(dialect.chunk_object))[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if self._usage else b"]}\n\n"

    def of(self, index: int, output: Output) -> bytes:
        """Return the chunks for new output of choice ``index``, as events; empty if there is nothing to say.

        A choice begins with its role (chat only), then comes text, and at the end the finish reason.
        """
        data = b""
        if index not in self._begun:
            self._begun.add(index)
            if self._dialect.first_delta is not None:
                data = self._chunk(index, self._dialect.first_delta)
        if output.text or (self._logprobs and output.token_ids):
            logprobs = encode(self._dialect.logprobs(output)) if self._logprobs else b"null"
            data += self._chunk(index, self._dialect.delta(output.text), logprobs)
        if output.end is not None:
            data += self._chunk(index, self._dialect.last_delta, reason=encode(output.end.client_reason))
        return data

    def usage(self, ends: Sequence[Finished]) -> bytes:
        """Return the last chunk, which has the usage of all choices and no choice; empty if not asked for."""
        return self._head + b'],"usage":' + encode(usage(ends)) + b"}\n\n" if self._usage else b""

    def _chunk(self, index: int, delta: bytes, logprobs: bytes = b"null", reason: bytes = b"null") -> bytes:
        """Return one event; ``delta``, ``logprobs`` and ``reason`` are JSON already."""
        return b'%s{"index":%d,%s%s,"logprobs":%s,"finish_reason":%s}%s' % (
            self._head,
            index,
            self._dialect.delta_name,
            delta,
            logprobs,
            reason,
            self._end,
        )
