"""A worker without a model, for measuring the router: it answers with events at a given pace.

    python -m bench.fake_worker PORT

It speaks ``GET /watch`` and ``POST /leg`` as an engine does, and answers the same request without frames on
``POST /v1/completions``. A request's body says how many events it wants (``max_tokens``) and how many per
second (``events_per_s``); the first one comes at once. As in an engine, all streams of one pace get their
events in the same step. The text of an event is the time at which it was written, in nanoseconds of
`time.perf_counter_ns`, which all processes of a machine share. ``GET /stats`` tells what is in progress.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from array import array
from urllib.parse import urlsplit

import msgspec
import uvloop

from segue.laps.cost import Coefficients
from segue.messages.fleet import REPORT_PERIOD_S, WorkerLoad, WorkerRecord, WorkerReport
from segue.messages.kv import KVIdentity
from segue.messages.leg import LEG_CONTENT, Data, End, Leg, LegOutput, pack_frame

# Qwen3-8B on an H200, roughly.
DEVICE = Coefficients(floor=0.006, start=0.002, per_token=2.2e-5, per_pair=2e-10, per_kv=4e-8)
EVENT = (
    b'data: {"id":"cmpl-00112233445566778899aabbccddeeff","object":"text_completion","created":1767225600,'
    b'"model":"Qwen3-8B","choices":[{"index":0,"text":" %d","logprobs":null,"finish_reason":null}]}\n\n'
)
DONE = b"data: [DONE]\n\n"
TOKEN = array("i", [1234]).tobytes()
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n"

encode = msgspec.json.Encoder().encode


class Wish(msgspec.Struct, frozen=True):
    """What a request's body asks for; its prompt is not read."""

    max_tokens: int
    events_per_s: float


decode_leg = msgspec.msgpack.Decoder(Leg).decode
decode_wish = msgspec.json.Decoder(Wish).decode


class Stream:
    """One reply in progress."""

    def __init__(self, transport: asyncio.Transport, wish: Wish, *, is_leg: bool) -> None:
        self.transport, self.left, self.pace, self.is_leg = (
            transport,
            wish.max_tokens,
            wish.events_per_s,
            is_leg,
        )

    def write(self) -> bool:
        """Write the next event, in one chunk; return whether there are more."""
        payload = EVENT % time.perf_counter_ns()
        data = pack_frame(Data(payload, [LegOutput(0, TOKEN)])) if self.is_leg else payload
        self.left -= 1
        if self.left:
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
            return True
        last = pack_frame(End(DONE)) if self.is_leg else DONE
        self.transport.write(b"%x\r\n%b%b\r\n0\r\n\r\n" % (len(data) + len(last), data, last))
        return False


class FakeWorker:
    """The state of the process."""

    def __init__(self, port: int) -> None:
        self.record = WorkerRecord(
            worker_id=f"127.0.0.1:{port}",
            url=f"http://127.0.0.1:{port}",
            incarnation=str(time.time_ns()),
            boot_id="host",
            role="both",
            model="model",
            tokenizer="tokenizer",
            page_size=64,
            max_seq_len=32_768,
            kv_bytes_per_token=147_456,
        )
        self.streams: dict[float, set[Stream]] = {}  # by pace
        self.num_connections = 0
        self.num_legs = 0  # since the begin
        self.num_skipped = 0  # events that were not written because the router did not read
        self.late_s = 0.0  # of the step that was written latest, since the last look

    def begin(self, stream: Stream) -> None:
        """Write the first event of a reply, and the others in the steps of its pace."""
        self.num_legs += stream.is_leg
        if not stream.write():
            return
        if stream.pace not in self.streams:
            self.streams[stream.pace] = set()
            asyncio.get_running_loop().create_task(self._step(stream.pace))
        self.streams[stream.pace].add(stream)

    def end(self, stream: Stream) -> None:
        """Forget a reply that is complete, or that nobody reads any more."""
        self.streams.get(stream.pace, set()).discard(stream)

    async def _step(self, pace: float) -> None:
        """Write one event of each stream per step, while there are streams."""
        streams, due = self.streams[pace], time.perf_counter()
        while streams:
            due += 1 / pace
            await asyncio.sleep(due - time.perf_counter())
            self.late_s = max(self.late_s, time.perf_counter() - due)
            for stream in list(streams):
                if stream.transport.get_write_buffer_size():
                    self.num_skipped += 1
                elif not stream.write():
                    streams.discard(stream)
        del self.streams[pace]

    def stats(self) -> dict[str, float]:
        """Return what is in progress, and what has happened."""
        late_s, self.late_s = self.late_s, 0.0
        return {
            "connections": self.num_connections,
            "legs": sum(stream.is_leg for streams in self.streams.values() for stream in streams),
            "num_legs": self.num_legs,
            "num_skipped": self.num_skipped,
            "late_s": late_s,
        }

    def report(self) -> WorkerReport:
        """Return a report as that of an idle engine."""
        return WorkerReport(
            epoch=0,
            state="active",
            heartbeat_age_s=0.1,
            load=WorkerLoad(
                queued_s=0.0, step_s=0.02, decode_rows=0, decode_kv=0, num_pages=1 << 20, taken_pages=0
            ),
            coefficients=(*DEVICE,),
            identity=KVIdentity("1", 0),
        )


class WorkerConnection(asyncio.Protocol):
    """One connection to the worker. It reads just enough HTTP for the router and this bench's clients."""

    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker
        self._data = b""
        self._stream: Stream | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._worker.num_connections += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self._worker.num_connections -= 1
        if self._stream is not None:
            self._worker.end(self._stream)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, blank, body = self._data.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
        if not blank or len(body) < length:
            return
        self._data = b""
        path = urlsplit(head.split(b" ", 2)[1]).path
        if path == b"/leg":
            self._begin(decode_wish(decode_leg(body).body), is_leg=True)
        elif path == b"/v1/completions":
            self._begin(decode_wish(body), is_leg=False)
        elif path == b"/watch":
            asyncio.get_running_loop().create_task(self._watch())
        else:
            stats = json.dumps(self._worker.stats()).encode()
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(stats), stats))

    def _begin(self, wish: Wish, *, is_leg: bool) -> None:
        self._transport.write(HEAD % (LEG_CONTENT.encode() if is_leg else b"text/event-stream"))
        self._stream = Stream(self._transport, wish, is_leg=is_leg)
        self._worker.begin(self._stream)

    async def _watch(self) -> None:
        """Report until the router has left."""
        self._transport.write(HEAD % b"application/x-ndjson")
        line = encode(self._worker.record) + b"\n"
        while not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(line), line))
            await asyncio.sleep(REPORT_PERIOD_S)
            line = encode(self._worker.report()) + b"\n"


async def serve(port: int) -> None:
    """Serve until the process is ended."""
    worker = FakeWorker(port)
    server = await asyncio.get_running_loop().create_server(
        lambda: WorkerConnection(worker), "127.0.0.1", port, backlog=4096
    )
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
