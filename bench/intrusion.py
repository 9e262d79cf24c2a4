"""Measures how long decoding streams stall while the server prefills a long prompt."""

from __future__ import annotations

import asyncio
import random
import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from segue.bench.client import Client, Job, StreamingRequest, clock

DEADLINE_S = 60.0
SETTLE_S = 0.5
DECODE_PROMPT = 128  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Intrusion:
    """The settings: decoding streams, and a long prompt that arrives while they decode."""

    decodes: int = 64
    decode_tokens: int = 3000  # enough for a stream to outlast the measurement
    prompt: int = 16_384  # tokens
    chunk: int = 8192  # prompt tokens that the server takes in one step
    repeats: int = 3
    max_id: int = 10_000

    def job(self, rng: random.Random, length: int, tokens: int) -> Job:
        """Return a request of `length` prompt tokens and `tokens` output tokens."""
        return Job(prompt=[rng.randint(0, self.max_id) for _ in range(length)], max_tokens=tokens)


async def measure(client: Client, scene: Intrusion, seed: int = 0) -> dict[str, Any]:
    """Measure seconds: an undisturbed stream's gap, the longest gap at each long prompt, and its bar.

    `chunk_s` is the time of a step of one chunk, alone: the first token of a prompt of one chunk, or the time
    that each further chunk adds to the first token of the whole prompt.

    Raises:
        TimeoutError: the streams do not begin, or the prompt is not answered.
    """
    rng = random.Random(seed)
    async with asyncio.timeout(DEADLINE_S):
        first, whole = [
            statistics.median([await _first_token(client, scene, rng, n) for _ in range(scene.repeats)])
            for n in (scene.chunk, scene.prompt)
        ]
        later = max(1, -(-scene.prompt // scene.chunk) - 1)
        streams = [
            client.connection(scene.job(rng, DECODE_PROMPT, scene.decode_tokens), clock())
            for _ in range(scene.decodes)
        ]
        try:
            await asyncio.gather(*(client.send(stream) for stream in streams))
            while any(len(stream.pieces) < 32 for stream in streams):
                _check_alive(streams)
                await asyncio.sleep(0.01)
            begin = clock()
            await asyncio.sleep(SETTLE_S)
            calm = clock()
            spans, ttfts = [], []
            for _ in range(scene.repeats):
                began = clock()
                intruder = await _answered(client, scene.job(rng, scene.prompt, 4))
                spans.append((began, clock()))
                ttfts.append(intruder.timeline().times[0] - began)
                await asyncio.sleep(SETTLE_S)
            _check_alive(streams)
            end = clock()
        finally:
            for stream in streams:
                stream.give_up()
    times = [[*stream.timeline().times, end] for stream in streams]  # a stream may stall up to the end
    step = statistics.median(gaps_around(times, begin, calm))
    chunk = max(first, (whole - first) / later)
    worst = [max(gaps_around(times, *span)) for span in spans]
    return {
        "step_s": step,
        "chunk_s": chunk,
        "alone_ttft_s": {str(scene.chunk): first, str(scene.prompt): whole},
        "ttft_s": ttfts,
        "worst_gap_s": worst,
        "allowed_gap_s": chunk + 2 * step,
    }


def _check_alive(streams: list[StreamingRequest]) -> None:
    """Raise a RuntimeError if a decoding stream has ended: its gaps would say nothing about the prompt."""
    for stream in streams:
        if stream.ended.is_set():
            why = stream.timeline().error or "it had all its tokens; give the Intrusion more decode_tokens"
            raise RuntimeError(f"a decoding stream ended: {why}")


async def _first_token(client: Client, scene: Intrusion, rng: random.Random, length: int) -> float:
    connection = await _answered(client, scene.job(rng, length, 1))
    timeline = connection.timeline()
    return timeline.times[0] - timeline.sent


async def _answered(client: Client, job: Job) -> StreamingRequest:
    """Send one request and return its connection once the reply is complete; raise if it failed."""
    connection = client.connection(job, clock())
    await client.send(connection)
    await connection.ended.wait()
    error = connection.timeline().error
    if error is not None:
        raise RuntimeError(f"a prompt of {len(job.prompt)} tokens was not answered: {error}")
    return connection


def gaps_around(streams: list[list[float]], since: float, until: float) -> list[float]:
    """Return the gaps of all streams that overlap the time from `since` to `until`, in seconds."""
    return [b - a for each in streams for a, b in pairwise(each) if a < until and b > since]
