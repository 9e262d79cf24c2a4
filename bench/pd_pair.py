"""A prefill engine and a decode engine for measurements, and one request that goes through both."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench import launch

OUTPUTS = 12  # tokens of each request that is handed over


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePair:
    """Two servers."""

    prefill: str  # URLs
    decode: str
    control: int  # port at which the decode engine finds the prefill engine

    def handover(self) -> dict[str, Any]:
        """Return what the decode engine counts."""
        return handover_of(self.decode)

    def recent(self, room: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what the prefill engine and the decode engine remember of one request."""
        found = [
            next(each for each in handover_of(url)["recent"] if each["handoff"] == room)
            for url in (self.prefill, self.decode)
        ]
        return found[0], found[1]


def handover_of(url: str) -> dict[str, Any]:
    """Return what an engine reports about handing over."""
    info = httpx.get(f"{url}/server_info", timeout=30).raise_for_status().json()
    found: dict[str, Any] = info["internal_states"][0]["handover"]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """One process of `segue` that answers HTTP."""

    name: str  # of its log
    words: Sequence[str]  # behind `segue`, without the port
    gpus: str | None = None  # its CUDA_VISIBLE_DEVICES; None: as they are


@contextmanager
def servers(commands: Sequence[ServerCommand], logs: Path) -> Iterator[list[str]]:
    """Start servers at the same time; yields their URLs once all of them are ready.

    Raises:
        RuntimeError: one of them did not become ready; the text has the end of its log.
    """
    urls = [f"http://127.0.0.1:{launch.free_port()}" for _ in commands]
    with ExitStack() as stack:
        stop = threading.Event()
        ready = [threading.Event() for _ in commands]
        failures: list[Exception] = []

        def serve(index: int) -> None:
            command = commands[index]
            words = [
                sys.executable,
                "-m",
                "segue",
                *command.words,
                f"--port={urls[index].rpartition(':')[2]}",
            ]
            variables = dict(os.environ)
            if command.gpus is not None:
                variables["CUDA_VISIBLE_DEVICES"] = command.gpus
            log = logs / f"{command.name}.log"
            try:
                with launch.running(words, urls[index], log=log, env=variables):
                    ready[index].set()
                    stop.wait()
            except Exception as error:
                text = log.read_text()[-4000:] if log.exists() else ""
                failures.append(RuntimeError(f"{error}\n{text}"))
                ready[index].set()

        threads = [threading.Thread(target=serve, args=(index,)) for index in range(len(commands))]
        for thread in threads:
            thread.start()
            stack.callback(thread.join)
        stack.callback(stop.set)
        for event in ready:
            event.wait()
        if failures:
            raise failures[0]
        yield urls


@contextmanager
def started(gpus: int, options: Sequence[str], logs: Path) -> Iterator[EnginePair]:
    """Start the two engines at the same time."""
    control = launch.free_port()
    own_first = ("0,1", "1,0") if gpus == 2 else (None, None)
    prefill = ["serve", "--role=prefill", f"--disaggregation-bootstrap-port={control}", *options]
    commands = [
        ServerCommand(name="prefill", words=prefill, gpus=own_first[0]),
        ServerCommand(name="decode", words=["serve", "--role=decode", *options], gpus=own_first[1]),
    ]
    with servers(commands, logs) as urls:
        yield EnginePair(prefill=urls[0], decode=urls[1], control=control)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver:
    """The times of one request, in seconds."""

    first: float  # until token 1 came from the prefill engine
    gap: float  # from then until token 2 came from the decode engine
    step: float  # between later tokens of the decode engine
    room: int  # that names it
    begin: float  # when it was sent, by `time.perf_counter`
    tokens: list[float]  # when each token came from the decode engine, by the same clock


async def hand_over(client: httpx.AsyncClient, pair: EnginePair, prompt: Sequence[int]) -> HandedOver:
    """Send a request to both engines, and time its tokens."""
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": OUTPUTS, "ignore_eos": True},
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": pair.control,
        "bootstrap_room": (room := random.getrandbits(62)),
    }
    begin = time.perf_counter()

    async def first_token() -> float:
        (await client.post(f"{pair.prefill}/generate", json=body)).raise_for_status()
        return time.perf_counter()

    reply = asyncio.create_task(first_token())
    events: list[tuple[float, int]] = []
    async with client.stream("POST", f"{pair.decode}/generate", json=body | {"stream": True}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                when = time.perf_counter()
                events.append((when, len(json.loads(line[6:])["output_ids"])))
    first = await reply
    at, (second, count) = next((i, event) for i, event in enumerate(events) if event[1] >= 2)
    last, total = events[-1]
    step = (last - second) / (total - count) if at + 1 < len(events) else 0.0
    counts = [0, *(number for _, number in events)]
    tokens = [when for index, (when, number) in enumerate(events) for _ in range(number - counts[index])]
    gap = second - first
    return HandedOver(first=first - begin, gap=gap, step=step, room=room, begin=begin, tokens=tokens)


def draw(rng: random.Random, length: int) -> list[int]:
    """Draw the ids of a prompt."""
    return [rng.randrange(300, 10_000) for _ in range(length)]
