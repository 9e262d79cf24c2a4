"""Serves the load of `bench.laps` to real servers: Segue's, with each order of prompts, and those of others.

Segue's servers are started here, and so are those of `--theirs`. An arm of `--url` is a server that runs
already. All of them are there from the start to the end, so each must leave the others enough memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench import report, suite
from bench.launch import filled, free_port, running, served
from bench.model_dir import with_tokenizer
from bench.serving import base_url
from segue.bench.load import SLO, Clients, Mixture
from segue.bench.serving import PATIENCE_S, WARM_UP, model_of

FIRST_COME, LAPS = "first come", "laps"
CLASSES = ("short", "long")
SATURATE_S = 30.0
START_OTHER_S = 600.0  # until a server of `--theirs` must be ready, which may compile a model before
ARMS: dict[str, list[str]] = {
    FIRST_COME: [],
    LAPS: ["--enable-laps-scheduler"],
    "no window": ["--enable-laps-scheduler", "--laps-window-ms", "0"],
}
# p99 of the time to first token of short prompts with LAPS, by that of an arm of `--url` with this name.
BARS = {"vllm": 0.4, "vllm tuned": 0.8}


def serve(args: argparse.Namespace, workload: Mixture, name: str) -> dict[str, Any]:
    """Serve every arm at every load; returns the figures by arm and load, medians over the repeats.

    Only one server has something to do at any time. What is known is saved after each repeat. With
    ``args.add`` the repeats of an arm go on behind those that are saved. The same repeat is the same load for
    each arm.
    """
    empty: dict[str, Any] = {"saturation_per_s": {}, "runs": []}
    earlier = json.loads((report.RESULTS / f"{name}.json").read_text()) if args.add else empty
    found = {(run["arm"], run["load"]): list(run["repeats"]) for run in earlier["runs"]}
    saturation: dict[str, float] = dict(earlier["saturation_per_s"])
    with _arms(args) as arms:
        for arm, clients in arms.items():
            if arm not in saturation:
                saturation[arm] = _saturation(clients, workload, args)
        for repeat in range(args.repeats):
            for arm in list(arms)[:: 1 if repeat % 2 == 0 else -1]:
                for share in args.load:
                    rate = args.rate or share * saturation[FIRST_COME]
                    runs = found.setdefault((arm, share), [])
                    runs.append(_at(arms[arm], rate, workload, args, seed=len(runs)))
                    print(f"repeat {repeat + 1} of {args.repeats}: {arm} at {share:.0%}", flush=True)
            figures = {"saturation_per_s": saturation, "runs": _medians(found)}
            report.save(name, {"arguments": vars(args), **figures})
    return figures


@contextmanager
def _arms(args: argparse.Namespace) -> Iterator[dict[str, Clients]]:
    """Start the servers; yields the clients of each arm."""
    with ExitStack() as stack:
        options, model = ["--disable-prefix-cache", *args.option], args.model
        if model in suite.SHAPES:
            model = str(stack.enter_context(with_tokenizer(Path(suite.model_dir(model)))))
            options += ["--load-format", "dummy"]
        if model is not None:
            options += ["--model", model]
        urls = {arm: stack.enter_context(served(*options, *ARMS[arm])) for arm in args.arms} | dict(args.url)
        for arm, command in args.theirs:
            port = free_port()
            urls[arm] = f"http://127.0.0.1:{port}"
            words = filled(command, model=model or "", port=port)
            log = report.RESULTS / f"{arm.replace(' ', '_')}.log"
            stack.enter_context(running(words, urls[arm], start_timeout=START_OTHER_S, log=log))
        yield {
            arm: stack.enter_context(Clients(url, model_of(url), args.processes)) for arm, url in urls.items()
        }


def _medians(found: Mapping[tuple[str, float], Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return one run per arm and load, with the medians over its repeats."""
    return [
        {
            "arm": arm,
            "load": share,
            "rate": each[0]["rate"],
            **{
                name: {
                    which: statistics.median(one[name]["ttft_s"][which] for one in each)
                    for which in ("p50", "p90", "p99")
                }
                for name in CLASSES
            },
            "repeats": each,
        }
        for (arm, share), each in found.items()
    ]


def judged(runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, float, float]]:
    """Return (label, short p99 of LAPS by that of another server, bar) per load and arm that has a bar."""
    p99 = {(run["arm"], run["load"]): run["short"]["p99"] for run in runs}
    return [
        (f"{arm}, at {load:.0%}", p99[LAPS, load] / theirs, BARS[arm])
        for (arm, load), theirs in p99.items()
        if arm in BARS and (LAPS, load) in p99
    ]


def named_url(text: str) -> tuple[str, str]:
    """Parse NAME=URL, for argparse."""
    name, url = _named(text, "http://host:port")
    return name, base_url(url)


def named_command(text: str) -> tuple[str, str]:
    """Parse NAME=COMMAND, for argparse."""
    name, command = _named(text, "COMMAND")
    if "{port}" not in command:
        raise argparse.ArgumentTypeError(f"{text!r}: the command must have {{port}}, to be told its port")
    return name, command


def _named(text: str, kind: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name or not value or name in ARMS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be NAME={kind}, and NAME none of {', '.join(ARMS)}, which are arms already"
        )
    return name, value


def _at(
    clients: Clients, rate: float, workload: Mixture, args: argparse.Namespace, seed: int
) -> dict[str, Any]:
    """Run one load; returns the rate, and a summary of each class."""
    run = clients.open_loop(
        rate,
        args.seconds,
        lengths=workload,
        burstiness=args.burstiness,
        seed=seed,
        patience=PATIENCE_S,
    )
    since, until = WARM_UP * args.seconds, args.seconds
    classes = {name: run.of(name).summary(since=since, until=until, slo=SLO()) for name in CLASSES}
    return {"rate": rate, **classes}


def _saturation(clients: Clients, workload: Mixture, args: argparse.Namespace) -> float:
    """Return the requests per second with so many at any time that the server is never idle.

    They are counted as if all were of the mean length, by the prompt tokens of those that ended.
    """
    seconds = min(args.seconds, SATURATE_S)
    run = clients.closed_loop(
        args.concurrency, seconds, lengths=workload, max_requests=args.max_requests, seed=99
    )
    return run.prompt_tokens_per_s(0.3 * seconds, seconds) / workload.mean_prompt
