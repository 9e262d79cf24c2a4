"""The call of ``POST /v1/responses``: a body becomes the request of a chat, and its text becomes items."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import msgspec

from segue.api.openai.replies import PARSED_CHARS
from segue.api.openai.responses.call import WantedResponse, parse_responses, responses_call
from segue.api.openai.responses.replies import ResponseReply
from segue.errors import SegueError
from segue.frontend.request import Generation, Output
from segue.frontend.thread_pool import INLINE_ENTRIES
from segue.launch.runtime import Runtime
from segue.server import large_generation
from segue.server.body import decode_json


async def parse_response(runtime: Runtime, data: bytes, reply_id: str | None) -> WantedResponse:
    """Makes a call of a body; the id takes the place of a random one."""
    body = await decode_json(runtime, data, parse_responses, large_generation.responses)
    return await responses_call(body, runtime.served_model, reply_id)


class ResponsesReply:
    """The reply to such a call."""

    def __init__(self, runtime: Runtime, wanted: WantedResponse, generation: Generation) -> None:
        self._reply = ResponseReply(wanted, generation.states[0], runtime.manager.table)
        self._thread_pool = runtime.manager.thread_pool
        self._wanted = wanted
        self._generation = generation

    def preparation(self, index: int) -> Awaitable[None] | None:
        """Counts the events that the client has already, in a thread if there are many."""
        is_long = self._reply.num_before > INLINE_ENTRIES
        return self._thread_pool.run(self._reply.catch_up) if is_long else None

    def event(self, index: int, output: Output) -> bytes:
        """Returns the events for new output."""
        return self._reply.event(output.end)

    def last_event(self) -> bytes:
        """Returns the event with the whole response, which ends a stream."""
        return self._reply.last_event()

    def failure(self, error: SegueError) -> bytes:
        """Returns the event that ends a stream with an error."""
        return self._reply.failure(error)

    async def whole(self) -> tuple[Any, int]:
        """Returns the whole reply, which a thread builds if its text is long; it is one value then."""
        (output,) = await self._generation.outputs()
        num_entries = len(output.text) // PARSED_CHARS + len(self._wanted.echo) // PARSED_CHARS
        return msgspec.Raw(await self._thread_pool.build(lambda: self._reply.whole(output), num_entries)), 1
