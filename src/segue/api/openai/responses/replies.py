"""The reply to ``POST /v1/responses``: whole, and as the numbered events of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from segue.api.openai.chat_fields import ReplyForm
from segue.api.openai.chat_text import PIECE_CHARS, num_reasoning_tokens
from segue.api.openai.replies import usage
from segue.api.openai.responses.call import WantedResponse
from segue.api.openai.responses.items import OutputItems, StreamEvent, settled
from segue.api.parsers.events import Event
from segue.api.parsers.message import MessageFormat, MessageParser
from segue.errors import SegueError
from segue.frontend.detokenizer import TokenTable
from segue.frontend.request import Output, RequestState
from segue.messages.requests import Finished

Status = Literal["in_progress", "completed", "incomplete", "failed"]
_encode = msgspec.json.Encoder().encode


class ResponseReply:
    """The reply of one call, which has one request."""

    def __init__(self, wanted: WantedResponse, state: RequestState, table: TokenTable) -> None:
        """Begin behind what the client has already, if the request begins with outputs."""
        self._wanted = wanted
        self._state = state
        self._table = table
        self._form = wanted.form or ReplyForm(text=MessageFormat())
        self._parser = MessageParser(self._form.text)
        self._items = OutputItems(f"{wanted.id}:{wanted.created}", one_call=self._form.one_call)
        self._num_pieces = 0  # of the text, that were taken
        self._num_events = 0
        self._has_begun = False
        (request,) = wanted.requests
        self._end_before = request.output_end
        # Of the text that the client has the events of; None: it has none, or they were counted.
        self._before: list[str] | None = None
        if wanted.stream and (request.outputs or request.output_end is not None):
            self._before = state.taken_pieces(0)

    # --- a stream ---

    @property
    def num_before(self) -> int:
        """How many pieces of text :meth:`catch_up` has to go through."""
        return len(self._before or ())

    def catch_up(self) -> None:
        """Count the events that the client has already; any thread may do so before the next event."""
        if (pieces := self._before) is not None:
            self._before = None
            self._num_events += len(self._opening())
            self._num_events += sum(map(len, self._taken(pieces, self._end_before)))

    def event(self, end: Finished | None) -> bytes:
        """Return the events for the text since the last call; ``end``: how the text has ended, if it has."""
        self.catch_up()
        events = self._opening()
        for more in self._taken(self._state.taken_pieces(self._num_pieces), end):
            events += more
        return b"".join(self._event(name, _encode(fields)) for name, fields in events)

    def _taken(self, pieces: Sequence[str], end: Finished | None) -> Iterator[list[StreamEvent]]:
        """Take pieces of the text, and perhaps its end; yields the events of each."""
        self._num_pieces += len(pieces)
        for piece in pieces:
            if piece:
                yield self._items.take(self._parser.push(piece))
        if end is not None:
            yield self._items.take(self._parser.finish())
            yield self._items.finish(is_complete=_status(end) == "completed")

    def last_event(self) -> bytes:
        """Return the event that ends a stream, which has the whole response."""
        self.catch_up()
        end = self._state.end
        assert end is not None
        name = f"response.{_status(end)}"
        return self._event(name, b'{"response":%b}' % self._response(_status(end), self._items.shown(), end))

    def failure(self, error: SegueError) -> bytes:
        """Return what ends a stream that an error breaks off."""
        self.catch_up()
        response = self._response("failed", self._items.shown(), error=error.message)
        events = [*self._opening(), ("response.failed", {"response": msgspec.Raw(response)})]
        return b"".join(self._event(name, _encode(fields)) for name, fields in events)

    def _opening(self) -> list[StreamEvent]:
        """Return what a stream begins with, unless it has begun."""
        if self._has_begun:
            return []
        self._has_begun = True
        response = msgspec.Raw(self._response("in_progress", []))
        return [(f"response.{name}", {"response": response}) for name in ("created", "in_progress")]

    def _event(self, name: str, fields: bytes) -> bytes:
        """Return one event; ``fields`` is the JSON of an object that is not empty."""
        number, self._num_events = self._num_events, self._num_events + 1
        kind = name.encode()
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b\n\n' % (kind, kind, number, fields[1:])

    # --- a whole reply ---

    def whole(self, output: Output) -> bytes:
        """Return the whole reply to a finished request, as JSON."""
        assert output.end is not None
        events: list[Event] = []
        for at in range(0, len(output.text), PIECE_CHARS):
            events += self._parser.push(output.text[at : at + PIECE_CHARS])
        events += self._parser.finish()
        self._items.take(settled(events))
        status = _status(output.end)
        self._items.finish(is_complete=status == "completed")
        return self._response(status, self._items.shown(), output.end)

    # --- both ---

    def _response(
        self,
        status: Status,
        output: Sequence[dict[str, Any]],
        end: Finished | None = None,
        error: str | None = None,
    ) -> bytes:
        """Return a response as JSON. A router reads the usage, which therefore comes before any text."""
        if end is not None and status == "failed":
            error = end.message or "the request was aborted"
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        head = {
            "id": self._wanted.id,
            "object": "response",
            "created_at": self._wanted.created,
            "model": self._wanted.model,
            "status": status,
            "usage": None if end is None else self._usage(end),
            "error": None if error is None else {"code": "server_error", "message": error},
            "incomplete_details": incomplete,
            "output": output,
        }
        return _encode(head)[:-1] + b"," + self._wanted.echo[1:]

    def _usage(self, end: Finished) -> dict[str, Any]:
        """Return the usage by the names of this API; reasoning that cannot be counted counts as none."""
        tokens = usage([end], 1)
        reasoning = num_reasoning_tokens(self._state.ids, self._parser.has_reasoned, self._table)
        return {
            "input_tokens": tokens["prompt_tokens"],
            "input_tokens_details": {**tokens["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": tokens["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoning or 0},
            "total_tokens": tokens["total_tokens"],
        }


def _status(end: Finished) -> Status:
    """Return what has become of a response whose text has ended."""
    match end.client_reason:
        case "stop":
            return "completed"
        case "length":
            return "incomplete"
        case _:
            return "failed"
