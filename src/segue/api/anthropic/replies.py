"""Replies of the Messages API: whole, and as the events of a stream."""

from __future__ import annotations

from typing import Any

import msgspec

from segue.api.anthropic.blocks import PLAIN, BlockStream, WholeBlocks
from segue.api.openai.chat_text import num_reasoning_tokens
from segue.api.openai.requests import Wanted
from segue.frontend.detokenizer import TokenTable
from segue.frontend.request import Output, RequestState
from segue.messages.requests import Finished

_REASONS = {"stop": "end_turn", "length": "max_tokens"}  # an abort has no name in Anthropic's API
_encode = msgspec.json.Encoder().encode


def event_bytes(content: dict[str, Any]) -> bytes:
    """Return an event of a stream, whose name is its type."""
    return b"event: %b\ndata: %b\n\n" % (content["type"].encode(), _encode(content))


class MessageReplies:
    """The reply to one call, whole or in events."""

    def __init__(self, wanted: Wanted, state: RequestState, table: TokenTable, context: int) -> None:
        """Take the call's request, as it is in flight, the model's tokens, and the tokens of its context."""
        (request,) = wanted.requests
        self._wanted, self._state, self._table, self._context = wanted, state, table, context
        self._max_tokens = request.options.max_tokens
        self._form = wanted.form or PLAIN
        # The client has the first event already where the request begins with outputs.
        self._has_begun = bool(request.outputs) or request.output_end is not None
        self._before = state.taken_text if wanted.stream else ""
        self._blocks: BlockStream | None = None

    def whole(self, output: Output) -> dict[str, Any]:
        """Return the reply with a finished output."""
        assert output.end is not None
        blocks = WholeBlocks(self._form, output.text)
        return self._message(
            blocks.content,
            **self._stop(output.end, has_call=blocks.has_call),
            usage=self._usage(output.end, has_reasoned=blocks.has_reasoned),
        )

    @property
    def num_before(self) -> int:
        """The characters that :meth:`catch_up` still has to parse."""
        return 0 if self._blocks is not None else len(self._before)

    def catch_up(self) -> None:
        """Parse what the client has; any thread may do so before the next event."""
        if self._blocks is None:
            self._blocks = BlockStream(self._form, self._before)

    def events(self, output: Output) -> bytes:
        """Return the events for new output."""
        self.catch_up()
        assert self._blocks is not None
        found: list[dict[str, Any]] = []
        if not self._has_begun:
            self._has_begun = True
            usage = {"input_tokens": len(self._state.prompt_ids), **_CACHED_NOTHING, "output_tokens": 0}
            message = self._message([], stop_reason=None, stop_sequence=None, usage=usage)
            found.append({"type": "message_start", "message": message})
        end = output.end
        found += self._blocks.push(output.text, is_last=end is not None)
        if end is not None:
            found.append(
                {
                    "type": "message_delta",
                    "delta": self._stop(end, has_call=self._blocks.has_call),
                    "usage": self._usage(end, has_reasoned=self._blocks.has_reasoned),
                }
            )
        return b"".join(map(event_bytes, found))

    @staticmethod
    def last_event() -> bytes:
        """Return the event that ends a stream."""
        return event_bytes({"type": "message_stop"})

    def _message(self, content: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        wanted = self._wanted
        head = {"id": wanted.id, "type": "message", "role": "assistant", "model": wanted.model}
        return head | {"content": content} | fields

    def _stop(self, end: Finished, *, has_call: bool) -> dict[str, str | None]:
        """Return why the reply has ended; a call counts more than the stop sequence behind it."""
        reason, matched = end.client_reason, None
        if reason == "stop" and has_call:
            reason = "tool_use"
        elif reason == "stop" and isinstance(end.matched, str):
            reason, matched = "stop_sequence", end.matched
        elif reason == "length" and self._is_full(end):
            reason = "model_context_window_exceeded"
        return {"stop_reason": _REASONS.get(reason, reason), "stop_sequence": matched}

    def _is_full(self, end: Finished) -> bool:
        """Whether the context had no room for ``max_tokens``."""
        wanted = self._max_tokens
        return (wanted is None or end.num_tokens < wanted) and (
            end.prompt_tokens + end.num_tokens >= self._context
        )

    def _usage(self, end: Finished, *, has_reasoned: bool) -> dict[str, Any]:
        """Return the tokens of a finished output; those of the prompt that were cached are counted apart."""
        usage: dict[str, Any] = {
            "input_tokens": end.prompt_tokens - end.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": end.cached_tokens,
            "output_tokens": end.num_tokens,
        }
        if self._form.text.thinks:
            count = num_reasoning_tokens(self._state.ids, has_reasoned, self._table)
            if count is not None:
                usage["output_tokens_details"] = {"thinking_tokens": count}
        return usage


_CACHED_NOTHING = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
