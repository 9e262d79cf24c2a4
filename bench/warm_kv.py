"""Measures warm KV: the first token behind a long prefix, on an engine that has taken over.

    python -m bench.warm_kv [--name=cpu_warm_kv] [--kills=5] [--prefix=4096] [--model=MODEL] [--option=…]

It runs ``segue serve --shadows 1 --warm-kv --deterministic`` with the other options, as `bench.failover`
does. In each round the engine that serves gets the same prefix with several suffixes, is killed, and its
successor gets one of these prompts as soon as the router knows it: *warm* are the first tokens of the engine
that has computed the prefix, *successor* is that of the successor's first request, and *cold* that of the
same request after a flush.

With ``--adoption`` it measures alone how long a full journal takes to become a prefix cache.

The bars: the successor finds 90 % of the prefix cached, its first token takes at most 1.2 times as long as a
warm one (medians), and its tokens are those of the engine before.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

import httpx

from bench import report
from bench.failover import END_S, model_options
from segue.cluster.pod_process import PodProcess
from segue.kvcache.journal import ROOT, PageJournal, PageRecord, journal_bytes, name_of
from segue.kvcache.prefix_cache import PrefixCache

LEAST_HIT, MOST_TIMES = 0.9, 1.2
NUM_SUFFIXES = 5
SUFFIX = 16  # tokens
MAX_ID = 300  # every model knows the ids below it
TOKENS = 8
ADOPTED = 50_000, 16  # pages, and tokens per page


def first_token(client: httpx.Client, ids: list[int]) -> tuple[float, int, list[int]]:
    """Return the seconds to the first token of a prompt, the number of cached tokens, and the output.

    The client lasts, because it takes longer to make one than to answer.
    """
    params = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": ids, "stream": True, "sampling_params": params}
    began, first, last = time.monotonic(), 0.0, dict[str, Any]()
    with client.stream("POST", "/generate", json=body) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                first = first or time.monotonic()
                last = json.loads(line[6:])
    return first - began, last["meta_info"]["cached_tokens"], last["output_ids"]


def adoption(num_pages: int, page_size: int) -> float:
    """Return the seconds that a full journal takes to be read, and to become a prefix cache."""
    memory = memoryview(bytearray(journal_bytes(num_pages, page_size)))
    journal = PageJournal(memory, num_pages=num_pages, page_size=page_size)
    journal.begin(name_of("facts"), name_of("memory"))
    for page in range(num_pages):  # chains of 256 pages
        parent = (page - 1, page) if page % 256 else (ROOT, 0)
        tokens = (page % MAX_ID, page // MAX_ID, *range(page_size - 2))
        journal.write(PageRecord(page, page + 1, *parent, tokens))
    gc.disable()  # as the worker does
    began = time.monotonic()
    found = journal.read(journal.weights, MAX_ID)
    PrefixCache(page_size).adopt(0, found.records)
    seconds = time.monotonic() - began
    gc.enable()
    assert len(found.records) == num_pages
    return seconds


def measure(options: list[str], *, kills: int, prefix: int, seed: int = 0) -> dict[str, Any]:
    """Run the rounds; returns the figures and the bars."""
    rng = random.Random(seed)
    warm, successor, cold, hits, is_equal = list[float](), list[float](), list[float](), list[float](), True
    with (
        PodProcess([*options, "--warm-kv", "--deterministic"]) as pod,
        httpx.Client(base_url=pod.url, timeout=END_S) as client,
    ):
        for number in range(kills):
            pod.wait_for_standby()
            common = rng.choices(range(3, MAX_ID), k=prefix)
            prompts = [common + rng.choices(range(3, MAX_ID), k=SUFFIX) for _ in range(NUM_SUFFIXES)]
            unseen = prompts.pop()
            first_token(client, prompts[0])
            replies = [first_token(client, prompt) for prompt in prompts[1:]]
            warm += [seconds for seconds, _, _ in replies]
            pod.kill_serving("engine")
            while client.get("/health").json().get("serving") != 1:
                time.sleep(0.002)  # `bench.failover` measures the takeover
            seconds, num_cached, output = first_token(client, unseen)
            successor.append(seconds)
            hits.append(num_cached / prefix)
            is_equal &= first_token(client, prompts[-1])[2] == replies[-1][2]
            client.post("/flush_cache").raise_for_status()
            seconds, num_cached, again = first_token(client, unseen)
            assert num_cached == 0, "the flush has left something"
            is_equal &= output == again
            cold.append(seconds)
            print(f"kill {number + 1} of {kills}: {successor[-1] * 1e3:.0f} ms, cold {seconds * 1e3:.0f} ms")
    medians: dict[str, float] = {
        name: statistics.median(seconds) * 1e3
        for name, seconds in (("warm", warm), ("successor", successor), ("cold", cold))
    }
    times = medians["successor"] / medians["warm"]
    return {
        "options": options,
        "kills": kills,
        "prefix": prefix,
        "first_token_ms": medians,
        "successor_ms": [seconds * 1e3 for seconds in successor],
        "bars": {
            "share of the prefix that was cached": (min(hits), LEAST_HIT, min(hits) >= LEAST_HIT),
            "first token by a warm one": (times, MOST_TIMES, times <= MOST_TIMES),
            "equal tokens": (float(is_equal), 1.0, is_equal),
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--name", default="cpu_warm_kv", help="of the file in bench/results")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--prefix", type=int, default=4096, help="tokens")
    parser.add_argument("--model", help="tiny, 0.6b or 8b, with dummy weights, or as in segue serve")
    parser.add_argument("--adoption", action="store_true", help="measure only how long pages take to adopt")
    args, options = parser.parse_known_args()
    if args.adoption:
        pages, size = ADOPTED
        seconds = min(adoption(pages, size) for _ in range(5))
        path = report.save(f"{args.name}_adoption", {"pages": pages, "page_size": size, "seconds": seconds})
        print(f"adopting {pages} pages of {size} tokens takes {seconds * 1e3:.0f} ms; wrote {path}")
        return 0
    with ExitStack() as stack:
        options += model_options(args.model, stack)
        figures = measure(options, kills=args.kills, prefix=args.prefix)
    load = subprocess.run(["uptime"], capture_output=True, text=True).stdout.strip()
    path = report.save(args.name, figures | {"load": load})
    rows = [(name, f"{value:.0f}") for name, value in figures["first_token_ms"].items()]
    report.show("first token, ms (median)", ("", "ms"), rows)
    verdicts = [
        (name, f"{value:.2f}", f"{bar:g}", "" if holds else "missed")
        for name, (value, bar, holds) in figures["bars"].items()
    ]
    report.show("bars", ("", "value", "bar", ""), verdicts)
    print(f"wrote {path}")
    return 0 if all(holds for _, _, holds in figures["bars"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
