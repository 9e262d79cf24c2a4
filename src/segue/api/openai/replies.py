"""OpenAI's answers: whole, and as the chunks of a stream.

A dialect has what differs between chat completions and completions. Each chunk of a stream has one choice;
what it adds is its delta. Deltas are bytes of JSON, because chunks are put together from encoded parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from segue.api.openai.echo import Echo
from segue.api.openai.requests import Wanted
from segue.api.openai.token_fields import PromptParts, token_name
from segue.frontend.detokenizer import TokenTable
from segue.frontend.request import LOWEST_LOGPROB, Output, RequestState
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
    _name: Callable[[int], str]  # writes a token in logprobs

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_in_choice = False  # whether fields about a prompt are part of its choice

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
            "token": self._name(token),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(self._table.tokens[token]),
        }


@dataclass(frozen=True, slots=True)
class CompletionDialect:
    """The answers of ``/v1/completions``. A stream has no first chunk of its own, as there is no role."""

    _table: TokenTable
    _name: Callable[[int], str]  # writes a token in logprobs

    object = "text_completion"
    chunk_object = "text_completion"
    prompt_in_choice = True  # whether fields about a prompt are part of its choice

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
        text = self._name
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


class Choices:
    """The choices of one call's answer, whole and in chunks, with the fields that the call asks for."""

    def __init__(
        self, kind: type[Dialect], wanted: Wanted, states: Sequence[RequestState], table: TokenTable
    ) -> None:
        """Take the call's requests, as they are in flight, and the model's tokens."""
        self._name = token_name(table, wanted.shown.as_ids)
        self.dialect = kind(table, self._name)
        self.parts = PromptParts(wanted.shown, table, states)
        self.has_logprobs = wanted.has_logprobs
        self._wanted = wanted
        self._states = states
        self._table = table
        self._echoes: dict[int, Echo] = {}

    def num_entries(self, index: int, output: Output) -> int:
        """Return how many entries a whole choice has, which says how long building and encoding it takes."""
        count = 1 + sum(1 + len(entry.top) for entry in output.logprobs) + self.parts.num_entries(index)
        if self._wanted.shown.echo:
            count += 2 * len(self._states[index].prompt_ids)
        return count

    def whole(self, index: int, output: Output) -> dict[str, Any]:
        """Return one entry of ``choices``, from a finished output."""
        assert output.end is not None
        text, logprobs = self.shown(index, output, begins=True)
        return {
            "index": index,
            **self.dialect.content(text),
            "logprobs": logprobs,
            "finish_reason": output.end.client_reason,
            **self.parts.of_output(output.token_ids),
            **(self.parts.of_prompt(index) if self.dialect.prompt_in_choice else {}),
        }

    def common(self) -> dict[str, Any]:
        """Return the fields of a whole answer that say something about its one prompt, where it has one."""
        return {} if self.dialect.prompt_in_choice else self.parts.of_prompt(0)

    def shown(self, index: int, output: Output, *, begins: bool) -> tuple[str, dict[str, Any] | None]:
        """Return text and logprobs of output, with the prompt's before them if the call wants an echo.

        ``begins``: it is the first output of its choice.
        """
        logprobs = self.dialect.logprobs(output) if self.has_logprobs else None
        if not self._wanted.shown.echo:
            return output.text, logprobs
        state, request = self._states[index], self._wanted.requests[index]
        if (echo := self._echoes.get(index)) is None:
            echo = self._echoes[index] = Echo.of(request.prompt, state.prompt_ids, self._table)
        if logprobs is not None:
            logprobs = echo.shifted(logprobs)
            if begins:
                num_top = request.options.logprobs
                logprobs = echo.before(logprobs, state.prompt_logprobs, num_top, self._name)
        return echo.text + output.text if begins else output.text, logprobs


class Chunks:
    """Encodes a stream's events; what does not change is encoded once."""

    def __init__(self, choices: Choices, wanted: Wanted) -> None:
        """Encode what every chunk of the call begins and ends with."""
        self._choices = choices
        self._dialect = choices.dialect
        self._parts = choices.parts
        self._shows_tokens = choices.has_logprobs or choices.parts.shows_ids
        # Whether a choice says something of its prompt before there is any output.
        self._opens = wanted.shown.echo or (choices.parts.shows_ids and choices.dialect.prompt_in_choice)
        self._usage = wanted.usage_in_stream
        # The client has the first chunk already where a request begins with outputs.
        self._begun = {
            index
            for index, request in enumerate(wanted.requests)
            if request.outputs or request.output_end is not None
        }
        self._head = b"data: " + encode(wanted.envelope(self._dialect.chunk_object))[:-1] + b',"choices":['
        self._end = b',"usage":null}\n\n' if self._usage else b"}\n\n"

    def of(self, index: int, output: Output) -> bytes:
        """Return the chunks for new output of choice ``index``, as events; empty if there is nothing to say.

        A choice begins with its role (chat only), then comes text, and at the end the finish reason.
        """
        data, parts = b"", self._parts
        begins = index not in self._begun
        if begins:
            self._begun.add(index)
            if self._dialect.first_delta is not None:
                ids = _members(parts.ids_of_prompt(index))
                data = self._chunk(index, self._dialect.first_delta, common=ids)
        if output.text or (self._shows_tokens and output.token_ids) or (begins and self._opens):
            text, logprobs = self._choices.shown(index, output, begins=begins)
            fields = parts.of_output(output.token_ids)
            if begins and self._dialect.prompt_in_choice:
                fields |= parts.ids_of_prompt(index)
            data += self._chunk(index, self._dialect.delta(text), encode(logprobs), fields=_members(fields))
        if output.end is not None:
            data += self._chunk(index, self._dialect.last_delta, reason=encode(output.end.client_reason))
        return data

    def usage(self, ends: Sequence[Finished]) -> bytes:
        """Return the last chunk, which has the usage of all choices and no choice; empty if not asked for."""
        return self._head + b'],"usage":' + encode(usage(ends)) + b"}\n\n" if self._usage else b""

    def _chunk(
        self,
        index: int,
        delta: bytes,
        logprobs: bytes = b"null",
        reason: bytes = b"null",
        fields: bytes = b"",
        common: bytes = b"",
    ) -> bytes:
        """Return one event; all parts of it are JSON already.

        ``fields`` are further ones of the choice, and ``common`` those beside it, with a comma before each.
        """
        return b'%s{"index":%d,%s%s,"logprobs":%s,"finish_reason":%s%s}]%s%s' % (
            self._head,
            index,
            self._dialect.delta_name,
            delta,
            logprobs,
            reason,
            fields,
            common,
            self._end,
        )


def _members(fields: dict[str, Any]) -> bytes:
    """Return fields as JSON that follows another field of the same object."""
    return b"," + encode(fields)[1:-1] if fields else b""
