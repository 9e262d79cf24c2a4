"""OpenAI's answers: whole, and as the chunks of a stream.

A dialect has what differs between chat completions and completions. Each chunk of a stream has one choice;
what it adds is its delta. Deltas are bytes of JSON, because chunks are put together from encoded parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from segue.api.openai.chat_text import MessageStream, WholeMessage, num_reasoning_tokens
from segue.api.openai.echo import Echo
from segue.api.openai.requests import Wanted
from segue.api.openai.token_fields import PromptParts, token_name
from segue.frontend.detokenizer import TokenTable
from segue.frontend.request import LOWEST_LOGPROB, Output, RequestState
from segue.frontend.thread_pool import INLINE_ENTRIES
from segue.messages.requests import Finished

PARSED_CHARS = 64  # that are parsed in the time of building and encoding one entry
encode = msgspec.json.Encoder().encode


def usage(ends: Sequence[Finished], n: int) -> dict[str, Any]:
    """Return ``usage``: the tokens of all choices, of which ``ends`` are the ends, ``n`` of each prompt.

    A prompt counts once, as its first choice has computed it.
    """
    prompts = ends[::n]
    prompt, completion = sum(end.prompt_tokens for end in prompts), sum(end.num_tokens for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in prompts)},
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


class ReplyChoices:
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
        self._num_reasoning: dict[int, int | None] = {}  # tokens, of choices that have ended

    def num_entries(self, index: int, output: Output) -> int:
        """Return how many entries a whole choice has, which says how long building and encoding it takes."""
        count = 1 + sum(1 + len(entry.top) for entry in output.logprobs) + self.parts.num_entries(index)
        if self._wanted.shown.echo:
            count += 2 * len(self._states[index].prompt_ids)
        if self._wanted.form is not None:
            count += len(output.text) // PARSED_CHARS
        return count

    def whole(self, index: int, output: Output) -> dict[str, Any]:
        """Return one entry of ``choices``, from a finished output."""
        assert output.end is not None
        text, logprobs = output.text, self.logprobs(index, output)
        if (echo := self.echo(index)) is not None:
            text = echo.text + text
            if logprobs is not None and (before := self.echoed_logprobs(index, echo)) is not None:
                logprobs = {name: [*before[name], *logprobs[name]] for name in before}
        reason = output.end.client_reason
        if (form := self._wanted.form) is None:
            content = self.dialect.content(text)
        else:
            message = WholeMessage(form, text)
            content = {"message": message.fields()}
            reason = self.ended(index, reason, bool(message.calls), message.has_reasoned)
        return {
            "index": index,
            **content,
            "logprobs": logprobs,
            "finish_reason": reason,
            **self.parts.of_output(output.token_ids),
            **(self.parts.of_prompt(index) if self.dialect.prompt_in_choice else {}),
        }

    def message_stream(self, index: int) -> MessageStream | None:
        """Return what makes the deltas of a choice, behind those that the client has; None: its text does."""
        form = self._wanted.form
        return None if form is None else MessageStream(form, self._states[index].taken_text)

    def ended(self, index: int, reason: str, has_call: bool, has_reasoned: bool) -> str:
        """Note how a choice with a form has ended; returns its reason, which may be a call."""
        self._num_reasoning[index] = num_reasoning_tokens(self._states[index].ids, has_reasoned, self._table)
        return "tool_calls" if has_call and reason == "stop" else reason

    def note_ended_before(self, index: int, has_reasoned: bool) -> None:
        """Note a choice of whose end the client had been told before; others have been noted."""
        if index not in self._num_reasoning:
            ids = self._states[index].ids
            self._num_reasoning[index] = num_reasoning_tokens(ids, has_reasoned, self._table)

    def usage_details(self) -> dict[str, Any]:
        """Return the fields of ``usage`` about what the choices are made of, once they have ended."""
        counts = [count for count in self._num_reasoning.values() if count is not None]
        form = self._wanted.form
        if form is None or not form.text.thinks or len(counts) < len(self._states):
            return {}
        return {"completion_tokens_details": {"reasoning_tokens": sum(counts)}}

    def common(self) -> dict[str, Any]:
        """Return the fields of a whole answer that say something about its one prompt, where it has one."""
        return {} if self.dialect.prompt_in_choice else self.parts.of_prompt(0)

    def echo(self, index: int) -> Echo | None:
        """Return what shows a choice's prompt before its output; None: the call wants no echo."""
        if not self._wanted.shown.echo:
            return None
        if (echo := self._echoes.get(index)) is None:
            prompt, ids = self._wanted.requests[index].prompt, self._states[index].prompt_ids
            echo = self._echoes[index] = Echo.of(prompt, ids, self._table)
        return echo

    def logprobs(self, index: int, output: Output) -> dict[str, Any] | None:
        """Return the logprobs of output; None: the call wants none."""
        if not self.has_logprobs:
            return None
        logprobs, echo = self.dialect.logprobs(output), self.echo(index)
        return logprobs if echo is None else echo.shifted(logprobs)

    def long_echoes(self) -> set[int]:
        """Return the choices whose echo has many entries."""
        if not self._wanted.shown.echo:
            return set()
        return {i for i, state in enumerate(self._states) if len(state.prompt_ids) > INLINE_ENTRIES}

    def echoed_logprobs(self, index: int, echo: Echo) -> dict[str, Any] | None:
        """Return the logprobs of a prompt; None: the call wants none."""
        if not self.has_logprobs:
            return None
        num_top = self._wanted.requests[index].options.logprobs
        return echo.logprobs(self._states[index].prompt_logprobs, num_top, self._name)


class Chunks:
    """Encodes a stream's events; what does not change is encoded once."""

    def __init__(self, choices: ReplyChoices, wanted: Wanted) -> None:
        """Encode what every chunk of the call begins and ends with."""
        self._choices = choices
        self._dialect = choices.dialect
        self._parts = choices.parts
        self._shows_tokens = choices.has_logprobs or choices.parts.shows_ids
        self._long = choices.long_echoes()
        self._openings: dict[int, bytes] = {}  # that were made before they are sent
        self._usage, self._n = wanted.usage_in_stream, wanted.n
        streams = map(choices.message_stream, range(len(wanted.requests) if wanted.stream else 0))
        self._messages = list(streams)
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

        A choice begins with its role (chat only) or its prompt (where an echo is wanted), then comes text,
        and at the end the finish reason.
        """
        data, begins = b"", index not in self._begun
        if begins:
            self._begun.add(index)
            data = self._openings.pop(index, b"") or self._opening(index)
        reason = None if output.end is None else output.end.client_reason
        if (message := self._messages[index]) is None:
            has_text = bool(output.text)
            delta = self._dialect.delta(output.text) if has_text or self._shows_tokens else b""
        else:
            added = message.delta(output.text, is_last=reason is not None)
            has_text, delta = bool(added), encode(added)
            if reason is not None:
                reason = self._choices.ended(index, reason, message.has_call, message.has_reasoned)
        if self._shows_tokens:
            data += self._with_tokens(
                index, output, delta, has_text=has_text, shows_prompt=begins and not data
            )
        elif has_text:
            data += self._chunk(index, delta)
        if reason is not None:
            fields = _members(self._parts.of_output([]))  # some clients read the ids of every chunk
            data += self._chunk(index, self._dialect.last_delta, reason=encode(reason), fields=fields)
        return data

    def _with_tokens(
        self, index: int, output: Output, delta: bytes, *, has_text: bool, shows_prompt: bool
    ) -> bytes:
        """Return the chunk for new output with its logprobs, its ids, and perhaps those of the prompt."""
        fields = self._parts.of_output(output.token_ids)
        if shows_prompt:
            fields |= self._parts.ids_of_prompt(index)
        if not output.token_ids and not has_text and "prompt_token_ids" not in fields:
            return b""
        logprobs = encode(self._choices.logprobs(index, output))
        return self._chunk(index, delta, logprobs, fields=_members(fields))

    def is_due(self, index: int) -> bool:
        """Whether :meth:`of` would have long work with a prompt; :meth:`open` does it before."""
        return index in self._long

    def open(self, index: int) -> None:
        """Make what a choice needs of its prompt; any thread may do so once the choice has output."""
        self._long.discard(index)
        if index in self._begun:
            self._choices.echo(index)
        else:
            self._openings[index] = self._opening(index)

    def _opening(self, index: int) -> bytes:
        """Return the chunk that says something before the output: the role (chat only), or the echo."""
        if self._dialect.first_delta is not None:
            return self._chunk(
                index, self._dialect.first_delta, common=_members(self._parts.ids_of_prompt(index))
            )
        if (echo := self._choices.echo(index)) is None:
            return b""
        logprobs = encode(self._choices.echoed_logprobs(index, echo))
        fields = _members(self._parts.ids_of_prompt(index))
        return self._chunk(index, self._dialect.delta(echo.text), logprobs, fields=fields)

    def usage(self, ends: Sequence[Finished]) -> bytes:
        """Return the last chunk, which has the usage of all choices and no choice; empty if not asked for."""
        if not self._usage:
            return b""
        for index, message in enumerate(self._messages):
            if message is not None:
                self._choices.note_ended_before(index, message.has_reasoned)
        found = usage(ends, self._n) | self._choices.usage_details()
        return self._head + b'],"usage":' + encode(found) + b"}\n\n"

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
