"""One leg at one worker: the request, the frames of its reply, and what is released at its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
from starlette.responses import Response

from segue.logs import logger
from segue.messages.leg import LEG_PATH, Data, End, Frame, Leg, LegFailed
from segue.router.answers import code_of, passed_on, read_whole
from segue.router.attempts import FailureKind, kind_of
from segue.router.breaker import LegEnd
from segue.router.entry import SentRequest
from segue.router.fleet import Assignment, WorkerView
from segue.router.frames import FrameError, LegReader
from segue.router.registry import Registry
from segue.router.request_trace import LegTrace
from segue.router.upstream_connection import Headers, UpstreamConnection, UpstreamError

_encode = msgspec.msgpack.Encoder().encode
PATH = LEG_PATH.encode()


class LegError(Exception):
    """A leg has failed. Its text says how, for the log and for the client."""

    def __init__(
        self,
        worker: WorkerView,
        kind: FailureKind,
        text: str,
        *,
        code: str | None = None,
        answer: Response | None = None,
        failed: LegFailed | None = None,
    ) -> None:
        """Make the error; at most one of ``answer`` and ``failed`` is there.

        Args:
            worker: that failed, as it was when the leg was sent.
            kind: of the failure.
            text: what happened.
            code: of the worker's error; None: it said none.
            answer: of the worker, in place of frames.
            failed: the worker's last frame.
        """
        super().__init__(text)
        self.worker = worker
        self.kind = kind
        self.code = code
        self.answer = answer
        self.failed = failed


def _nothing(frame: Data) -> bool:
    return False


class WorkerLeg:
    """A leg at a worker. Its :meth:`close` must be called, whatever happens: it releases the hold."""

    def __init__(
        self, registry: Registry, sent: SentRequest, worker: WorkerView, trace: LegTrace | None = None
    ) -> None:
        self._trace = trace
        self._registry = registry
        self._sent = sent
        self._worker = worker
        self._reader = LegReader()
        self._connection: UpstreamConnection | None = None
        self._end: LegEnd = "client_left"  # unless something else happens
        self.is_over = False  # whether the last frame has come, and the leg went well
        self._status = 0
        self._code: str | None = None

    async def open(self, leg: Leg, headers: Headers) -> None:
        """Send the leg; return once the worker has taken it. Raises LegError if it does not."""
        if self._trace is not None:
            headers = [*headers, *self._trace.headers]
        try:
            self._connection = await self._sent.entry.upstream.request(b"POST", PATH, headers, _encode(leg))
            self._status = self._connection.status
            if self._status == 200:
                return
            body = await read_whole(self._connection)
        except UpstreamError as error:
            raise self._failure(error.end, str(error)) from None
        self._end, self._code = "answered", code_of(body)
        answer = Response(body, self._status)
        answer.raw_headers += passed_on(self._connection.headers)
        kind = kind_of(self._end, self._status, self._code, False)
        text = f"it was answered {self._status} {self._code or ''}".rstrip()
        raise LegError(self._worker, kind, text, code=self._code, answer=answer)

    async def read(self, push: Callable[[Data], bool] = _nothing) -> list[Frame]:
        """Returns the frames that have arrived, at least one; nothing comes behind `End`.

        Args:
            push: gets each part of the reply first, at once when it arrives, and returns whether it has done
                all that is to do with it. What it has done is not returned, nor waited for by a task: an
                event of a stream costs 10 µs less.

        Raises:
            LegError: the worker was lost.
        """
        assert self._connection is not None
        frames: list[Frame] = []
        broken: FrameError | None = None

        def take(data: bytes) -> bool:
            nonlocal frames, broken
            try:
                frames = self._reader.feed(data)
            except FrameError as error:
                broken = error
                return False
            for index, frame in enumerate(frames):
                if type(frame) is not Data or not push(frame):
                    frames = frames[index:]
                    return False
            frames = []
            return True

        try:
            await self._connection.read_by(take)
            if broken is not None:
                raise UpstreamError("cut", str(broken))
            if not frames:
                raise UpstreamError("cut", "its reply ended without a last frame")
        except UpstreamError as error:
            raise self._failure(error.end, str(error)) from None
        if type(frames[-1]) is not Data:
            self._end = "answered"
            self.is_over = type(frames[-1]) is End
        return frames

    def failure(self, failed: LegFailed) -> LegError:
        """Returns the error for a worker's last frame."""
        self._status, self._code = failed.status, failed.code
        kind = kind_of("answered", 200, failed.code, failed.retryable)
        text = f"it ended with status {failed.status} {failed.code}".rstrip()
        return LegError(self._worker, kind, text, code=failed.code, failed=failed)

    async def finish(self) -> None:
        """Read the end of the reply behind the last frame, so that the connection can be used again."""
        assert self._connection is not None
        with suppress(UpstreamError):
            await self._connection.read()

    def close(self) -> None:
        """Give the connection back, which aborts what has not ended; and release the hold."""
        if self._connection is not None:
            self._sent.entry.upstream.done(self._connection)
        self._registry.end(self._sent, self._end, self._status, self._code)
        if self._trace is not None:
            self._trace.end(self._end, self._status, self._code, is_well=self.is_over)

    def _failure(self, end: LegEnd, text: str) -> LegError:
        self._end = end
        logger.warning("worker %s failed at a request: %s", self._worker.id, text)
        return LegError(self._worker, kind_of(end, self._status, None, False), text)


class PrefillLeg:
    """The first leg of a pair. Its reply has nothing for the client, and is read until it ends."""

    def __init__(self, leg: WorkerLeg, message: Leg, headers: Headers, assignment: Assignment) -> None:
        """Send the leg; ``assignment`` is what its worker does for the request."""
        self.assignment = assignment
        self.room = message.room
        self.ended_at: float | None = None  # when each prompt had its next token, on the monotonic clock
        self.task = asyncio.ensure_future(self._read(leg, message, headers))

    @property
    def has_failed(self) -> bool:
        """Whether it failed before its end."""
        return self.task.done() and self.ended_at is None

    async def close(self, grace_s: float = 0.0) -> None:
        """Abort the leg unless it ends within ``grace_s`` seconds."""
        if grace_s:
            await asyncio.wait({self.task}, timeout=grace_s)
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def _read(self, leg: WorkerLeg, message: Leg, headers: Headers) -> None:
        """Read all frames; raises LegError if the leg fails."""
        try:
            await leg.open(message, headers)
            while True:
                last: Frame = (await leg.read())[-1]
                if isinstance(last, LegFailed):
                    raise leg.failure(last)
                if isinstance(last, End):
                    break
            self.ended_at = time.monotonic()
            await leg.finish()
        finally:
            leg.close()


def names_tokens(frames: Sequence[Frame]) -> bool:
    """Whether frames have more than signs of life."""
    return any(type(frame) is not Data or frame.payload or frame.outputs for frame in frames)
