"""Measures what the frontend costs per generated token: HTTP, tokenizer, detokenizer and the replies.

The server is the real one, with the tokenizer of the bundled model; its worker has the real scheduler and no
model: each step it gives every stream the next token of its own prompt. 128 clients stream at once, each on
its own connection, from a text of about 128 tokens. What counts is the CPU time of the frontend's process,
from the first request to the last reply, per token: other processes of the machine do not count. A token
must have an event of its own, as it has while a model is slower than the frontend; the worker's steps are
long enough for that. One round in which every reply has one token alone tells what a request costs.

With ``--traces`` the server also sends spans to a collector, which this program is, and the bar is higher.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec

from bench import launch, report
from bench.router_fleet import cpu_s
from segue.bench.client import StreamingRequest, clock
from segue.checkpoint.source import resolve
from segue.config import default_cache_dir

ROOT = Path(__file__).resolve().parents[1]
BAR_US = 40.0
TRACED_BAR_US = 44.0  # with --traces
STEP_S = 0.05
DEADLINE_S = 120.0
NUM_WORDS = 110  # of a prompt: about 128 tokens
END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
MIN_EVENTS = 0.9  # per token; special tokens of a repeated prompt have no text, and so no event


@dataclass(frozen=True, slots=True)
class StreamedRoute:
    """A route, and the body that asks it to continue a text by a number of tokens."""

    path: str
    body: Callable[[str, int], dict[str, Any]]


def _native(text: str, tokens: int) -> dict[str, Any]:
    params = {"max_new_tokens": tokens, "temperature": 0.6, "ignore_eos": True}
    return {"text": text, "sampling_params": params}


def _openai(tokens: int) -> dict[str, Any]:
    options = {"max_tokens": tokens, "temperature": 0.6, "ignore_eos": True}
    return {"model": "model", "stream_options": {"include_usage": True}, **options}


def _tokens(text: str, tokens: int) -> dict[str, Any]:
    params = {"max_tokens": tokens, "temperature": 0.6, "ignore_eos": True}
    ids = list(text.encode()[:128])  # any ids will do
    return {"token_ids": ids, "sampling_params": params, "stream_options": {"include_usage": True}}


ROUTES = {
    "completions": StreamedRoute("/v1/completions", lambda text, n: {"prompt": text, **_openai(n)}),
    "chat": StreamedRoute(
        "/v1/chat/completions",
        lambda text, n: {"messages": [{"role": "user", "content": text}], **_openai(n)},
    ),
    "generate": StreamedRoute("/generate", _native),
    "token ids": StreamedRoute("/inference/v1/generate", _tokens),
}


class CountingCollector:
    """Takes spans over HTTP, and counts their bytes."""

    def __init__(self) -> None:
        self.num_bytes = 0
        collector = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                collector.num_bytes += len(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, daemon=True).start()


def payload(route: StreamedRoute, tokens: int, rng: random.Random) -> bytes:
    """Return a request with a prompt that no other request has."""
    words = ("river", "stone", "house", "small", "the", "of", "garden", "walked", "into", "evening", "light")
    text = " ".join(rng.choices(words, k=NUM_WORDS))
    body = msgspec.json.encode(route.body(text, tokens) | {"stream": True})
    head = f"POST {route.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def stream_all(port: int, route: StreamedRoute, streams: int, tokens: int, seed: int) -> int:
    """Send all requests at once, and return the number of events that came.

    Raises:
        RuntimeError: a reply is not complete.
        TimeoutError: a reply has not ended within ``DEADLINE_S``.
    """
    rng, loop = random.Random(seed), asyncio.get_running_loop()
    requests = [StreamingRequest(payload(route, tokens, rng), clock(), tokens) for _ in range(streams)]
    connecting = (loop.create_connection(lambda each=each: each, "127.0.0.1", port) for each in requests)
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*connecting)
        await asyncio.gather(*(each.ended.wait() for each in requests))
    events = 0
    for each in requests:
        raw = b"".join(data for _, data in each.pieces)
        if not raw.endswith(END) or b'"completion_tokens":%d' % tokens not in raw:
            raise RuntimeError(f"a reply is not complete: {raw[:200]!r} … {raw[-300:]!r}")
        events += raw.count(b"data: {")
    return events


def measure(url: str, pid: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return µs per token and per request, by route."""
    port = int(url.rpartition(":")[2])

    def cost(route: StreamedRoute, tokens: int, seed: int) -> tuple[float, int]:
        """Return the CPU seconds of one round, and its events."""
        before = cpu_s(pid)
        events = asyncio.run(stream_all(port, route, args.streams, tokens, seed))
        return cpu_s(pid) - before, events

    found: dict[str, Any] = {}
    for name, route in ROUTES.items():
        per_token, per_request, per_event = [], [], []
        for repetition in range(args.repetitions + 1):
            whole, events = cost(route, args.tokens, 2 * repetition)
            one, _ = cost(route, 1, 2 * repetition + 1)
            if repetition > 0:  # the first warms up
                num_tokens = args.streams * args.tokens
                per_token.append(round(1e6 * whole / num_tokens, 2))
                per_request.append(round(1e6 * one / args.streams, 1))
                per_event.append(round(events / num_tokens, 3))
        found[name] = {
            "us_per_token": statistics.median(per_token),
            "us_per_request_of_one_token": statistics.median(per_request),
            "events_per_token": min(per_event),
            "repetitions": per_token,
        }
    return found


def main() -> int:
    """Run the benchmark; the exit code is 1 if the bar is missed, or if tokens shared events."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--traces", action="store_true", help="have the server send spans")
    args = parser.parse_args()
    bar_us = TRACED_BAR_US if args.traces else BAR_US
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is stopped
    port = launch.free_port()
    options = {
        "model": str(resolve(None, "auto", default_cache_dir()).directory),
        "served_model_name": "model",
        "load_format": "dummy",
        "port": port,
        "log_level": "error",
        "max_running_requests": args.streams,
        "max_model_len": 1024,
        "num_kv_tokens": 1024 * args.streams,
        "chunked_prefill_size": 1024 * args.streams,
    }
    collector = CountingCollector()
    if args.traces:
        options["otlp_traces_endpoint"] = collector.url
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    env = os.environ | {"PYTHONPATH": path, "FAKE_STEP_S": str(STEP_S)}
    command = [sys.executable, "-m", "tests.server.fake_server", json.dumps(options)]
    url = f"http://127.0.0.1:{port}"
    with launch.started(command, url, env=env) as process:
        routes = measure(url, process.pid, args)
    worst = max(each["us_per_token"] for each in routes.values())
    fewest = min(each["events_per_token"] for each in routes.values())
    facts = report.circumstances()
    rows = [
        [
            name,
            f"{each['us_per_token']:.1f}",
            f"{bar_us:g}",
            f"{each['us_per_request_of_one_token']:.0f}",
            f"{each['events_per_token']:.2f}",
        ]
        for name, each in routes.items()
    ]
    title = f"frontend's CPU time, {args.streams} streams of {args.tokens} tokens, on {facts['cpu']}"
    report.show(title, ["", "µs per token", "bar", "µs per request", "events per token"], rows)
    record = {"unit": "µs", "worst": worst, "bar": bar_us, "streams": args.streams, "tokens": args.tokens}
    name = "host_per_token"
    if args.traces:
        name, record["bytes_of_spans"] = "host_per_token_traces", collector.num_bytes
        if not collector.num_bytes:
            raise RuntimeError("no spans came")
    print(f"written to {report.save(name, {**record, 'routes': routes})}")
    if fewest < MIN_EVENTS:
        print("tokens shared events, so the figures are too low: this machine has other work; try again")
    return 0 if worst <= bar_us and fewest >= MIN_EVENTS else 1


if __name__ == "__main__":
    sys.exit(main())
