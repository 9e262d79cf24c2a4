"""One native call while it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

from segue.api.native.calls import NativeCall, NativeReply
from segue.frontend.stream import RequestStream, merged, results
from segue.frontend.thread_pool import INLINE_ENTRIES, turn
from segue.frontend.tokenizer_manager import TokenizerManager


class Generation:
    """The streams of a call. Leaving the ``with`` block aborts those that have not ended."""

    def __init__(self, manager: TokenizerManager, call: NativeCall, streams: list[RequestStream]) -> None:
        self.num_entries = 0  # of the result: one for each reply, each token, and each log-probability
        self._manager = manager
        self._call = call
        self._streams = streams
        self._replies = [
            NativeReply(
                manager,
                stream,
                logprobs=request.options.logprobs >= 0,
                text_in_logprobs=call.text_in_logprobs,
            )
            for stream, request in zip(streams, call.requests, strict=True)
        ]
        self._stack = ExitStack()
        for stream in streams:
            self._stack.enter_context(stream)

    @classmethod
    async def start(cls, manager: TokenizerManager, call: NativeCall) -> Generation:
        """Submit a call's requests; raises what :meth:`TokenizerManager.submit_batch` does."""
        return cls(manager, call, await manager.submit_batch(call.requests, call.batch_id))

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort what has not ended."""
        self._stack.close()

    @property
    def streams(self) -> list[RequestStream]:
        """One a request."""
        return self._streams

    async def result(self) -> Any:
        """The finished reply; a list for a batch."""
        outputs = await results(self._streams)
        for index, (reply, output) in enumerate(zip(self._replies, outputs, strict=True)):
            reply.add(output)
            self.num_entries += reply.num_entries
            await turn(index)
        if self.num_entries <= INLINE_ENTRIES:
            bodies = self._bodies()
        else:
            bodies = await self._manager.thread_pool.run(self._bodies)
        return bodies if self._call.batch_id is not None else bodies[0]

    def _bodies(self) -> list[dict[str, Any]]:
        return [reply.body() for reply in self._replies]

    async def updates(self) -> AsyncIterator[dict[str, Any]]:
        """The reply as it grows; in a batch each update has its prompt's ``index``."""
        is_batch = self._call.batch_id is not None
        async for index, output in merged(self._streams):
            self._replies[index].add(output)
            body = self._replies[index].body()
            yield body | {"index": index} if is_batch else body
