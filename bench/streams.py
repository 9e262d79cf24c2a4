"""Keeps streams of tokens from a server running, and records when each token arrives."""

from __future__ import annotations

import bisect
import itertools
import json
import multiprocessing
import threading
import time
import urllib.request
from multiprocessing.connection import Connection
from typing import Any

TOKENS = 256  # per request; the next request of a stream follows when one is done
START_S = 120.0
QUIET_S = 30.0  # within which the last tokens must arrive after the streams are stopped

Spans = list[tuple[float, float]]  # begins and ends, by `time.monotonic`


class Streams:
    """Sends greedy requests, one after the other on each stream, until the ``with`` block ends.

    The streams run in a process of their own, so that they take no processor time from this process.
    """

    def __init__(self, url: str, count: int) -> None:
        """Prepare `count` streams from the server at `url`; they begin with the ``with`` block."""
        self.count = count
        self._url = url
        self._times: list[list[float]] = []
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(url, count, theirs), daemon=True)

    def __enter__(self) -> Streams:
        """Start the streams and wait until the server runs all of them."""
        self._process.start()
        deadline = time.monotonic() + START_S
        while state(self._url)["running_batch_size"] < self.count:
            assert time.monotonic() < deadline and self._process.is_alive(), "the streams do not run"
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End all streams, and fetch their tokens' times."""
        if not self._process.is_alive():
            return
        self._ours.send("stop")
        body = json.dumps({"abort_all": True}).encode()
        urllib.request.urlopen(json_request(f"{self._url}/abort_request", body), timeout=30).close()
        assert self._ours.poll(QUIET_S), "the streams do not end"
        found = self._ours.recv()
        self._process.join()
        assert not isinstance(found, str), f"a stream failed: {found}"
        self._times = found

    def rate(self, spans: Spans) -> float:
        """Return the tokens per second within the spans, after `stop`.

        A token counts evenly over the time since the token before it.
        """
        tokens = sum(_count(mine, end) - _count(mine, start) for mine in self._times for start, end in spans)
        return tokens / sum(end - start for start, end in spans)

    def longest_gap(self, start: float, end: float) -> float:
        """Return the longest gap in seconds of one stream that overlaps the span, after `stop`."""
        gaps = [
            after - before
            for stream in self._times
            for before, after in itertools.pairwise(stream)
            if after > start and before < end
        ]
        return max(gaps)


def json_request(url: str, body: bytes) -> urllib.request.Request:
    """Return a POST of JSON; without a type, urllib would name that of a form, which the server refuses."""
    return urllib.request.Request(url, body, {"Content-Type": "application/json"})


def state(url: str) -> dict[str, Any]:
    """Return the internal state that the server reports."""
    with urllib.request.urlopen(f"{url}/server_info", timeout=30) as response:
        found: dict[str, Any] = json.load(response)["internal_states"][0]
        return found


def _count(times: list[float], at: float) -> float:
    """Return how many tokens one stream had at the time `at`; a fraction of the token that comes next."""
    index = bisect.bisect_right(times, at)
    if not 0 < index < len(times):
        return index
    before, after = times[index - 1 : index + 1]
    return index + (at - before) / (after - before)


def _run(url: str, count: int, pipe: Connection) -> None:
    """Run the streams in their process until `pipe` has a message, then send back each stream's times.

    If a stream failed, the errors' text is sent instead.
    """
    stopped, errors = threading.Event(), []
    times: list[list[float]] = [[] for _ in range(count)]

    def stream(number: int, mine: list[float]) -> None:
        """Send one request after the other until the end; `mine` gets the time of each token."""
        length = 1 + TOKENS * number // count  # staggers the streams, so that contexts have all lengths
        try:
            while not stopped.is_set():
                params = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
                body = json.dumps({"input_ids": [*range(1, 65)], "sampling_params": params, "stream": True})
                length = TOKENS
                with urllib.request.urlopen(json_request(f"{url}/generate", body.encode())) as response:
                    for line in response:
                        if line.startswith(b"data: {"):
                            mine.append(time.monotonic())
        except Exception as error:
            errors.append(repr(error))

    threads = [threading.Thread(target=stream, args=each, daemon=True) for each in enumerate(times)]
    for thread in threads:
        thread.start()
    pipe.recv()
    stopped.set()
    for thread in threads:
        thread.join(QUIET_S / 2)
    pipe.send("; ".join(errors) or times)
