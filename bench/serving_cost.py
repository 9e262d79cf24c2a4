"""Measures the cost of serving: 8 streams over HTTP against the same 8 requests in process, same cores.

All runs are bfloat16, with prompts of 128 tokens, 128 new tokens each, and no prefix cache. Served: `segue
serve`, with this process as the client, which reads and parses every event of `/v1/completions`. In process:
one `Engine.generate` of all 8. Both take turns; the whole wall time counts, prefill included; medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from typing import Any

import httpx

import segue
from bench import launch, report, workload

NUM_STREAMS = 8
PROMPT_LEN = 128
NUM_TOKENS = 128
BAR = 0.75


async def stream_all(url: str, model: str, batch: list[list[int]]) -> int:
    """Send all prompts at once, each on its own connection, and return the number of tokens received."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        return sum(await asyncio.gather(*(_stream(client, model, prompt) for prompt in batch)))


async def _stream(client: httpx.AsyncClient, model: str, prompt: list[int]) -> int:
    """Stream one greedy completion; return its number of tokens, by the usage that ends the stream."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    tokens = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
    return tokens


def served_speed(url: str, model: str, batch: list[list[int]]) -> float:
    """Return the tokens per second over HTTP."""
    began = time.perf_counter()
    tokens = asyncio.run(stream_all(url, model, batch))
    seconds = time.perf_counter() - began
    assert tokens == NUM_STREAMS * NUM_TOKENS, f"{tokens} tokens came"
    return tokens / seconds


def in_process_speed(engine: Any, batch: list[list[int]]) -> float:
    """Return the tokens per second of one call of the engine."""
    began = time.perf_counter()
    replies = engine.generate(input_ids=batch, sampling_params=workload.greedy(NUM_TOKENS))
    seconds = time.perf_counter() - began
    tokens = sum(len(reply["output_ids"]) for reply in replies)
    assert tokens == NUM_STREAMS * NUM_TOKENS, f"{tokens} tokens came"
    return tokens / seconds


def main() -> int:
    """Run the benchmark; the exit code is 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    speeds: dict[str, list[float]] = {"in process": [], "served": []}
    with (
        launch.served("--dtype", "bfloat16", "--disable-prefix-cache") as url,
        segue.Engine(dtype="bfloat16", disable_prefix_cache=True) as engine,
    ):
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        for repetition in range(args.repetitions + 1):
            batch = workload.prompts(NUM_STREAMS, PROMPT_LEN, seed=repetition)
            pair = (in_process_speed(engine, batch), served_speed(url, model, batch))
            if repetition > 0:  # the first warms up
                for values, speed in zip(speeds.values(), pair, strict=True):
                    values.append(round(speed, 2))
    medians = {side: statistics.median(values) for side, values in speeds.items()}
    ratio = medians["served"] / medians["in process"]
    report.show(
        f"{NUM_STREAMS} streams, tokens/s, medians",
        ["", *medians, "ratio", "bar"],
        [["bfloat16", *(f"{speed:.1f}" for speed in medians.values()), f"{ratio:.2f}", f"{BAR:.2f}"]],
    )
    figures = {
        "unit": "tokens/s",
        "medians": medians,
        "ratio": round(ratio, 3),
        "bar": BAR,
        "repetitions": speeds,
    }
    print(f"written to {report.save('serving_cost', figures)}")
    return 0 if ratio >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
