"""A lean client of OpenAI-compatible servers: it records when bytes arrive, and parses them after the load.

It opens one connection per request, HTTP/1.1 over asyncio. While a load runs, an event costs one callback
that appends to a list; chunks, events and JSON are parsed when the load is over, so that the client does not
become the bottleneck. All times are of `time.perf_counter`, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

clock = time.perf_counter


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request of a load."""

    prompt: Sequence[int] | str  # token ids, or text
    max_tokens: int  # the exact number of output tokens: EOS is ignored
    due: float = 0.0  # when to send it, in seconds after the load begins
    label: str = ""  # of its class, for summaries


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The times of one request, and how it ended."""

    due: float  # when the request should have been sent
    sent: float  # when it was sent; if it never was, when the client gave it up
    times: list[float]  # when each event with text arrived
    tokens: int  # output tokens as the server counted them; 0 if the reply did not end
    max_tokens: int  # output tokens that the request asked for
    given_up: bool  # whether the client gave the request up at the load's end
    error: str | None  # None: the request ended as it should, or was given up
    label: str = ""
    prompt_tokens: int = 0  # as the client sent them; 0: the prompt was a text


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None  # which some servers send before the answer


class _Choice(msgspec.Struct):
    text: str | None = None  # of a text completion
    delta: _Delta | None = None  # of a chat completion

    @property
    def has_text(self) -> bool:
        return bool(self.text or (self.delta and (self.delta.content or self.delta.reasoning_content)))


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


_decode = msgspec.json.Decoder(_Event).decode


def base_url(text: str) -> str:
    """Return a server's URL without the path /v1, as it is usually given for clients of OpenAI's API.

    Raises:
        ValueError: it is not the URL of a server.
    """
    url = text.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number
        is_valid = False
    if not is_valid or parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"{text!r}: must be a server's URL, like http://host:port or https://host/path/v1")
    return url


class StreamingRequest(asyncio.Protocol):
    """The connection of one request: sends it when connected, then keeps the bytes of the reply."""

    def __init__(
        self,
        payload: bytes,
        due: float,
        max_tokens: int,
        label: str = "",
        prompt_tokens: int = 0,
        *,
        exact: bool = True,
    ) -> None:
        """Prepare the request.

        Args:
            payload: the bytes to send, head and body.
            due: when to send them, by `clock`.
            max_tokens: the number of tokens that must come for the reply to count as complete.
            label: of the request's class, for the timeline.
            prompt_tokens: for the timeline too.
            exact: whether fewer tokens are an error.
        """
        self._exact = exact
        self.due = due
        self._label, self._prompt_tokens = label, prompt_tokens
        self.sent = 0.0
        self.pieces: list[tuple[float, bytes]] = []
        self.ended = asyncio.Event()
        self._payload, self._max_tokens = payload, max_tokens
        self._transport: asyncio.Transport | None = None
        self._failure: str | None = None
        self._given_up = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.sent = clock()
        transport.write(self._payload)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((clock(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()

    def give_up(self) -> None:
        """Close the connection if the reply has not ended."""
        if not self.ended.is_set():
            self._given_up = True
            self.sent = self.sent or clock()  # if the request was not sent, it is at least this late
            if self._transport is not None:
                self._transport.abort()

    def fail(self, error: OSError) -> None:
        """Record that the request could not be sent."""
        self._failure = str(error)
        self.sent = clock()
        self.ended.set()

    def timeline(self) -> Timeline:
        """Parse the reply."""
        times, tokens, error = _read(self.pieces)
        if not self._exact:
            tokens = tokens or len(times)  # of a server that does not count them
        if error is None and tokens != self._max_tokens and self._exact:
            error = f"{tokens} tokens came, {self._max_tokens} were asked for"
        elif error is None and not times:
            error = f"{tokens} tokens came, but no text: nothing to time"
        return Timeline(
            due=self.due,
            sent=self.sent,
            times=times,
            tokens=tokens,
            max_tokens=self._max_tokens,
            given_up=self._given_up,
            error=None if self._given_up else self._failure or error,
            label=self._label,
            prompt_tokens=self._prompt_tokens,
        )


class Client:
    """Sends the requests of a load to one server."""

    def __init__(
        self, url: str, model: str, *, key: str | None = None, chat: bool = False, exact: bool = True
    ) -> None:
        """Prepare requests to a server.

        Args:
            url: as `base_url` returns it.
            model: the name by which requests ask for it.
            key: that requests carry as a bearer token.
            chat: send prompts, which are texts then, as chats.
            exact: have each reply go on to its last token. Servers that do not know the field `ignore_eos`
                need False: then a reply may end before.

        Raises:
            ValueError: `url` is not the URL of a server.
        """
        parts = urlsplit(base_url(url))
        assert parts.hostname is not None
        self._host, self._model, self._chat, self._exact = parts.hostname, model, chat, exact
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (80 if self._tls is None else 443)
        shown = f"[{self._host}]" if ":" in self._host else self._host
        route = f"{parts.path}/v1/{'chat/completions' if chat else 'completions'}"
        self._head = f"POST {route} HTTP/1.1\r\nHost: {shown}:{self._port}\r\nConnection: close\r\n"
        if key is not None:
            self._head += f"Authorization: Bearer {key}\r\n"

    def connection(self, job: Job, due: float) -> StreamingRequest:
        """Encode the request of `job` and return its connection, which `send` opens."""
        prompt = (
            {"messages": [{"role": "user", "content": job.prompt}]} if self._chat else {"prompt": job.prompt}
        )
        body = msgspec.json.encode(
            {
                "model": self._model,
                **prompt,
                "max_tokens": job.max_tokens,
                "temperature": 0.6,
                **({"ignore_eos": True} if self._exact else {}),
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        head = f"{self._head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        prompt_tokens = 0 if isinstance(job.prompt, str) else len(job.prompt)
        return StreamingRequest(
            head.encode() + body, due, job.max_tokens, job.label, prompt_tokens, exact=self._exact
        )

    async def send(self, connection: StreamingRequest) -> None:
        """Connect and send the request; `connection` receives the reply."""
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: connection, self._host, self._port, ssl=self._tls)
        except OSError as error:
            connection.fail(error)

    async def open_loop(self, jobs: Sequence[Job], begin: float, end: float) -> list[StreamingRequest]:
        """Send each job when it is due, even if others still run; give up unfinished jobs at `end`."""

        async def one(job: Job, connection: StreamingRequest) -> None:
            await asyncio.sleep(connection.due - clock())
            await self._run(connection, end)

        connections = [self.connection(job, begin + job.due) for job in jobs]
        await asyncio.gather(*(one(*pair) for pair in zip(jobs, connections, strict=True)))
        return connections

    async def closed_loop(
        self, jobs: Sequence[Job], concurrency: int, begin: float, end: float
    ) -> list[StreamingRequest]:
        """Keep `concurrency` jobs running until `end` or until no job is left; give up unfinished jobs."""
        waiting = [self.connection(job, begin) for job in reversed(jobs)]
        begun: list[StreamingRequest] = []

        async def one() -> None:
            while waiting and clock() < end:
                connection = waiting.pop()
                connection.due = clock()
                begun.append(connection)
                await self._run(connection, end)

        await asyncio.sleep(begin - clock())
        await asyncio.gather(*(one() for _ in range(concurrency)))
        return begun

    async def _run(self, connection: StreamingRequest, end: float) -> None:
        """Send a request and wait for its reply, until `end` at the latest."""
        with suppress(TimeoutError):
            async with asyncio.timeout(end - clock()):
                await self.send(connection)
                await connection.ended.wait()
        connection.give_up()


def _read(pieces: Sequence[tuple[float, bytes]]) -> tuple[list[float], int, str | None]:
    """Parse one HTTP reply: the times of events with text, the number of tokens, and the error, if any."""
    raw = b"".join(data for _, data in pieces)
    head, _, body = raw.partition(b"\r\n\r\n")
    if not head:
        return [], 0, "no reply"
    status = head.split(b"\r\n", 1)[0].decode()
    if " 200 " not in status:
        return [], 0, f"{status}: {body[:300].decode(errors='replace')}"
    chunked = b"transfer-encoding: chunked" in head.lower()
    times: list[float] = []
    tokens, ended, rest = 0, False, b""
    for when, data in _chunks(pieces, len(head) + 4) if chunked else _after(pieces, len(head) + 4):
        *events, rest = (rest + data).replace(b"\r\n\r\n", b"\n\n").split(b"\n\n")
        for event in events:
            value = event.removeprefix(b"data:").strip() if event.startswith(b"data:") else b""
            if value == b"[DONE]":
                ended = True
            elif value.startswith(b"{"):
                content = _decode(value)
                if content.error is not None:
                    return times, tokens, str(content.error)
                if content.usage is not None:
                    tokens = content.usage.completion_tokens
                if content.choices and content.choices[0].has_text:
                    times.append(when)
    return times, tokens, None if ended else "the stream was cut"


def _after(pieces: Sequence[tuple[float, bytes]], skip: int) -> list[tuple[float, bytes]]:
    """Return the pieces without their first `skip` bytes."""
    left = []
    for when, data in pieces:
        if skip < len(data):
            left.append((when, data[skip:]))
        skip = max(0, skip - len(data))
    return left


def _chunks(pieces: Sequence[tuple[float, bytes]], skip: int) -> list[tuple[float, bytes]]:
    """Return the chunks of the chunked HTTP body, each with the time at which it was complete."""
    found, buffer = [], b""
    for when, data in _after(pieces, skip):
        buffer += data
        at = 0
        while (line := buffer.find(b"\r\n", at)) >= 0:
            end = line + 2 + int(buffer[at:line], 16)
            if len(buffer) < end + 2:
                break
            found.append((when, buffer[line + 2 : end]))
            at = end + 2
        buffer = buffer[at:]
    return found
