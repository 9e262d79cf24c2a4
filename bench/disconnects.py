"""Lets half of 200 concurrent streams disconnect, and looks for what that leaves behind in a server.

    python -m bench.disconnects [--minutes=10] [--streams=200] [--name=disconnects] [--seed=0]
                                [--option=value …]

A server of a tiny model, deterministic, answers on real sockets. Each stream is, drawn at random, either read
to its end and compared with the reply that the same request got when it ran alone, or left: closed or reset
after some events, half-closed, closed within the request or before the reply, or never read. Prompts have one
word to several chunks; outputs are greedy, drawn, guided, with penalties, log-probabilities or two choices.
There are more streams than rows, and too few pages for all rows. Other options are those of ``segue serve``.

The bars: every reply that is read is complete and equal to the one alone. The scheduler's invariants hold at
each look, and no row and no page is held at the end. The resident memory of the server's processes has grown
by at most 5 % from the half minute behind the first minute to the last half minute; of runs shorter than
three minutes, from the sixth behind the first third to the last sixth.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from bench import launch, report
from bench.failover_soak import descendants
from bench.leaving_clients import LEAVES, Address, BrokenReplyError, Leave, StreamRequest, leave, stay
from bench.router_fleet import num_descriptors, rss_mib
from tests.support.streams import WORDS
from tests.support.tiny_model import write_model

MODEL = "tiny-model"
NUM_RECORDED = 64  # requests whose replies are known
EVERY_S = 2.0  # between two looks at the server
WARM_S, WINDOW_S = 60.0, 30.0
IDLE_S = 60.0  # in which nothing may be held any more
MOST_GROWTH = 0.05  # of the resident memory
ENDLESS = 400  # tokens of a reply that its client leaves
OPTIONS = (
    *("--device=cpu", "--deterministic", "--dtype=float32", "--load-format=dummy", "--log-level=warning"),
    *("--max-running-requests=64", "--num-kv-tokens=8192", "--page-size=16", "--chunked-prefill-size=256"),
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def draw_request(rng: random.Random, tokens: int, *, ends: bool = True) -> StreamRequest:
    """Return a random request for about so many tokens; unless it ``ends``, for all of them."""
    prompt = " ".join(
        [str(rng.randrange(1000)), *rng.choices(WORDS.split(), k=rng.choice([1, 8, 8, 40, 40, 40, 200]))]
    )
    greedy = {"temperature": 0, "ignore_eos": True}
    drawn = {"temperature": 0.9, "ignore_eos": True}
    seed = rng.randrange(1000)
    chat = {"model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens}
    text = {"model": MODEL, "prompt": prompt, "max_tokens": tokens}
    native = {"max_new_tokens": tokens, "sampling_seed": seed}
    regex = {"regex": f"([a-f]{{1,3}}-[0-9]{{1,3}};){{{tokens},}}"}
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    kinds: list[StreamRequest] = [
        StreamRequest(path="/generate", body={"text": prompt, "sampling_params": native | greedy}),
        StreamRequest(
            path="/generate",
            body={"text": prompt, "return_logprob": True, "sampling_params": native | drawn},
        ),
        StreamRequest(path="/generate", body={"text": prompt, "sampling_params": native | drawn | regex}),
        StreamRequest(path="/v1/completions", body=text | drawn | {"seed": seed, "frequency_penalty": 0.4}),
        StreamRequest(path="/v1/completions", body=text | greedy | {"n": 2}),
        StreamRequest(
            path="/v1/chat/completions", body=chat | greedy | {"logprobs": True, "top_logprobs": 2}
        ),
        StreamRequest(
            path="/v1/chat/completions",
            body=chat | {"temperature": 0.9, "seed": seed, "response_format": form},
        ),
    ]
    return rng.choice(kinds if ends else kinds[:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakLook:
    """What a server holds at one moment of the run."""

    at_s: float  # since the beginning
    rss_mib: Sequence[float]  # of each of its processes, the frontend's first
    running: int
    waiting: int


@dataclass(slots=True)
class Crowd:
    """Streams of which about half are left."""

    address: Address
    recorded: Sequence[tuple[StreamRequest, Any]]  # with the replies that they got alone
    until: float  # by the monotonic clock: no further stream begins
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    @property
    def num_streams(self) -> int:
        """How many have begun."""
        return sum(self.counts[name] for name in ("read to the end", *LEAVES))

    async def run(self, streams: int, seed: int) -> None:
        """Keep so many streams going."""
        await asyncio.gather(*(self._one_place(random.Random(f"{seed} {place}")) for place in range(streams)))

    async def _one_place(self, rng: random.Random) -> None:
        """Run one stream after the other."""
        while time.monotonic() < self.until:
            try:
                if rng.random() < 0.5:
                    await self._stay(*rng.choice(self.recorded))
                else:
                    await self._leave(rng, rng.choice(LEAVES))
            except (BrokenReplyError, OSError) as error:
                self.faults.append(repr(error)[:2000])

    async def _stay(self, request: StreamRequest, alone: Any) -> None:
        self.counts["read to the end"] += 1
        content = await stay(self.address, request)
        if content != alone:
            raise BrokenReplyError(f"{content} to {request}; alone it was {alone}")
        self.counts["complete and correct"] += 1

    async def _leave(self, rng: random.Random, how: Leave) -> None:
        self.counts[how] += 1
        request, count = draw_request(rng, ENDLESS, ends=False), rng.choice([1, 1, 2, rng.randint(3, 60)])
        had_events = await leave(self.address, request, how, count, rng)
        self.counts["left after an event"] += had_events  # in a line of its own: others count meanwhile


@dataclass(slots=True, kw_only=True)
class SoakedServer:
    """The server, as it is seen from outside."""

    url: str
    pid: int
    log: Path
    http: httpx.Client

    @property
    def address(self) -> Address:
        """Its host and port."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None and parts.port is not None
        return parts.hostname, parts.port

    @property
    def pids(self) -> list[int]:
        """All its processes."""
        return [self.pid, *(pid for pid, _ in descendants(self.pid))]

    def state(self) -> dict[str, Any]:
        """Return the scheduler's state, with its ``problems``."""
        state: dict[str, Any] = self.http.get("/server_info").raise_for_status().json()["internal_states"][0]
        return state

    def held(self) -> dict[str, int]:
        """Return what is held once nothing is, or after ``IDLE_S``; what is only cached is dropped first."""
        deadline = time.monotonic() + IDLE_S
        while True:
            self.http.post("/flush_cache")
            state, health = self.state(), self.http.get("/health").json()
            held = {
                "requests": health.get("num_requests", 0),
                "running": state["running_batch_size"],
                "waiting": state["waiting_queue_size"],
                "rows": state["req_to_token_pool_used"],
                "KV tokens": self._num_kv_tokens - state["available_kv_tokens"],
                "problems": len(state["problems"]),
            }
            if not any(held.values()) or time.monotonic() > deadline:
                return held
            time.sleep(0.1)

    @property
    def _num_kv_tokens(self) -> int:
        tokens: int = self.http.get("/server_info").json()["max_total_num_tokens"]
        return tokens

    def rss_mib(self) -> list[float]:
        """Return the resident memory of each of its processes, the frontend's first."""
        return [round(rss_mib(pid), 1) for pid in self.pids]

    def descriptors(self) -> int:
        """Return how many files and sockets its processes have open."""
        return sum(num_descriptors(pid) for pid in self.pids)

    def look(self, began: float) -> tuple[SoakLook, list[str]]:
        """Return what it holds, and the broken invariants."""
        state = self.state()
        look = SoakLook(
            at_s=round(time.monotonic() - began, 1),
            rss_mib=self.rss_mib(),
            running=state["running_batch_size"],
            waiting=state["waiting_queue_size"],
        )
        return look, state["problems"]


@contextmanager
def soaked_server(options: Sequence[str]) -> Iterator[SoakedServer]:
    """Start a server of a tiny model, whose state has the broken invariants."""
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory) / MODEL, max_position_embeddings=4096)
        port, log = launch.free_port(), Path(directory) / "log"
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "bench.checked_serve", "serve", "--port", str(port)]
        command += [f"--model={model}", *OPTIONS, *options]
        with (
            launch.started(command, url, log=log) as process,
            httpx.Client(base_url=url, timeout=60.0, trust_env=False) as http,
        ):
            yield SoakedServer(url=url, pid=process.pid, log=log, http=http)


async def record(address: Address, count: int, seed: int) -> list[tuple[StreamRequest, Any]]:
    """Return so many requests with the replies that they get alone."""
    rng, found = random.Random(f"{seed} recorded"), []
    for _ in range(count):
        request = draw_request(rng, rng.randint(8, 64))
        found.append((request, await stay(address, request)))
    return found


async def watch(server: SoakedServer, crowd: Crowd, began: float) -> list[SoakLook]:
    """Look at the server until no further stream begins."""
    looks: list[SoakLook] = []
    pause_s = min(EVERY_S, (crowd.until - began) / 30)
    while time.monotonic() < crowd.until:
        look, problems = await asyncio.to_thread(server.look, began)
        looks.append(look)
        crowd.faults += [f"after {look.at_s:g} s: {problem}" for problem in problems]
        if len(looks) % 15 == 0:
            print(f"{look}, {crowd.num_streams} streams, {len(crowd.faults)} faults", flush=True)
        await asyncio.sleep(pause_s)
    return looks


def growth(looks: Sequence[SoakLook]) -> tuple[list[float], list[float]]:
    """Return the resident memory behind the warm-up and at the end, in MiB: medians of each process."""
    end = looks[-1].at_s
    warm, window = min(WARM_S, end / 3), min(WINDOW_S, end / 6)
    first = [look.rss_mib for look in looks if warm <= look.at_s <= warm + window]
    last = [look.rss_mib for look in looks if look.at_s >= end - window]
    return (
        [statistics.median(values) for values in zip(*first, strict=True)],
        [statistics.median(values) for values in zip(*last, strict=True)],
    )


def judged(
    faults: Sequence[str],
    held: Mapping[str, int],
    warm_mib: Sequence[float],
    end_mib: Sequence[float],
    *,
    num_tracebacks: int,
) -> list[str]:
    """Return one sentence per bar that is missed, and the first faults of the streams."""
    missed = [
        *faults[:20],
        *(f"at the end, {count} {name} are held" for name, count in held.items() if count),
    ]
    grown = sum(end_mib) / sum(warm_mib) - 1
    if grown > MOST_GROWTH:
        missed.append(f"the memory has grown by {grown:.1%}; at most {MOST_GROWTH:.0%} are allowed")
    if num_tracebacks:
        missed.append(f"the log has {num_tracebacks} tracebacks")
    return missed


def soak(
    options: Sequence[str], *, minutes: float, streams: int, recorded: int = NUM_RECORDED, seed: int = 0
) -> dict[str, Any]:
    """Run it; returns the figures, with what misses a bar under ``missed``.

    ``recorded``: how many requests are first answered alone.
    """

    async def run(server: SoakedServer) -> tuple[Crowd, list[SoakLook]]:
        alone = await record(server.address, recorded, seed)
        print(f"{len(alone)} requests were answered alone", flush=True)
        began = time.monotonic()
        crowd = Crowd(server.address, alone, began + 60 * minutes)
        looks, _ = await asyncio.gather(watch(server, crowd, began), crowd.run(streams, seed))
        return crowd, looks

    with soaked_server(options) as server:
        descriptors = server.descriptors()
        crowd, looks = asyncio.run(run(server))
        held = server.held()
        state = server.state()
        idle_mib = server.rss_mib()
        descriptors = server.descriptors() - descriptors
        tracebacks = server.log.read_text(errors="replace").count("Traceback")
    warm_mib, end_mib = growth(looks)
    missed = judged(crowd.faults, held, warm_mib, end_mib, num_tracebacks=tracebacks)
    return {
        "options": list(options),
        "minutes": minutes,
        "streams": streams,
        "counts": dict(crowd.counts),
        "num_faults": len(crowd.faults),
        "held": held,
        "most_running": max(look.running for look in looks),
        "most_waiting": max(look.waiting for look in looks),
        "num_looks": len(looks),
        "steps": state["num_steps"],
        "tokens": state["num_generated_tokens"],
        "preemptions": state["num_preemptions"],
        "rss_mib": {"warm": warm_mib, "end": end_mib, "idle": idle_mib},
        "growth": round(sum(end_mib) / sum(warm_mib) - 1, 4),
        "more_descriptors": descriptors,
        "rss_every_minute": [(look.at_s, look.rss_mib) for look in looks[:: max(1, round(60 / EVERY_S))]],
        "missed": missed,
    }


def main() -> int:
    """Run the benchmark; the exit code is 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--name", default="disconnects", help="of the file in bench/results")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args, options = parser.parse_known_args()
    figures = soak(options, minutes=args.minutes, streams=args.streams, seed=args.seed)
    load = subprocess.run(["uptime"], capture_output=True, text=True).stdout.strip()
    path = report.save(args.name, figures | {"load": load})
    counts, rss = figures["counts"], figures["rss_mib"]
    rows = [(name, f"{count:,}") for name, count in counts.items()]
    rows += [(f"held at the end: {name}", str(count)) for name, count in figures["held"].items()]
    rows += [
        ("memory behind the warm-up, at the end, MiB", f"{sum(rss['warm']):.0f}, {sum(rss['end']):.0f}"),
        (f"growth; at most {MOST_GROWTH:.0%}", f"{figures['growth']:+.1%}"),
        ("tokens, preemptions", f"{figures['tokens']:,}, {figures['preemptions']:,}"),
    ]
    report.show(f"{args.streams} streams, {args.minutes:g} minutes", ["", ""], rows)
    for fault in figures["missed"]:
        print(fault)
    print(f"{load}; wrote {path}")
    return 1 if figures["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
