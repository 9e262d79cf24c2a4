"""Compares a prefill and a decode engine with two engines that do both, on equal GPUs and behind the router.

    python -m bench.pd MODEL --gpus 2 --against-two [--only mixture] [--seconds 60] [--repeats 3] [--load 0.8]

Each arm is a router with two engines, one per GPU. All four engines run from the start to the end, and only
one arm has something to do at any time; the order is turned around with each repeat. The loads are prompts of
1,024 tokens with 256 output tokens, and the mixture of `bench.laps` with 64 to 256. Requests come by a
Poisson process at a share of the rate at which the slower of the two arms is saturated, so that neither arm
has a queue that only grows. The bar is for the time between tokens, for whose sake the roles are apart: its
p99 may be at most half of that of two engines. JSON of GPUs goes to bench/results after each repeat; figures
of CPUs, where the engines share the cores, are only printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from bench import report
from bench.pd_pair import EnginePair, ServerCommand, handover_of, servers, started
from segue.bench.load import SLO, Clients, Lengths, LogNormal, Mixture
from segue.bench.serving import PATIENCE_S, WARM_UP, model_of

TWO, PAIR = "two engines", "prefill + decode"
BAR = 0.5  # p99 of the time between tokens, of the pair by that of two engines
# Limits by class; "" is the class of a load that has only one.
SLOS = {"": SLO(ttft=0.4), "short": SLO(ttft=0.4), "long": SLO(ttft=2.0)}
LOADS: dict[str, Lengths | Mixture] = {
    "1k": Lengths(prompt=(1024, 1024), output=(256, 256)),
    "mixture": Mixture(output=(64, 256)),
}
# Loads of the same kinds for CPUs, which show that everything runs.
SMALL_LOADS: dict[str, Lengths | Mixture] = {
    "1k": Lengths(prompt=(32, 32), output=(8, 8)),
    "mixture": Mixture(
        long_share=0.4,
        short=LogNormal(median=12, sigma=0.8, least=4, most=32),
        long=LogNormal(median=100, sigma=0.3, least=64, most=128),
        output=(4, 8),
    ),
}
READY_S = 60.0  # until a router has heard of its engines
COLUMNS = ["", "load", "req/s", "gap p50", "p99", "TTFT p50", "p99", "good/s", "lost"]


@contextmanager
def routed(words: Sequence[str], count: int, logs: Path, name: str) -> Iterator[str]:
    """Start a router with ``count`` engines; yields its URL once all of them serve."""
    command = ServerCommand(name=name, words=["router", "--log-level=warning", *words])
    with servers([command], logs) as (url,):
        deadline = time.monotonic() + READY_S
        while (health := httpx.get(f"{url}/health", timeout=5).json()).get("serving") != count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name}: not all {count} engines serve after {READY_S:g} s: {health}")
            time.sleep(0.05)
        yield url


@contextmanager
def arms(gpus: int, options: Sequence[str], logs: Path) -> Iterator[tuple[dict[str, str], EnginePair]]:
    """Start both arms; yields the URLs of their routers, and the engines of the pair.

    The arms start one after the other: each engine measures the free memory of its GPU.
    """
    both = ["serve", *options]
    two = [
        ServerCommand(name=f"engine-{index}", words=both, gpus=str(index) if gpus == 2 else None)
        for index in range(2)
    ]
    with ExitStack() as stack:
        workers = stack.enter_context(servers(two, logs))
        pair = stack.enter_context(started(gpus, options, logs))
        roles = ["--prefill", pair.prefill, "--decode", pair.decode]
        yield (
            {
                TWO: stack.enter_context(routed(["--worker", *workers], 2, logs, "router-two")),
                PAIR: stack.enter_context(routed(roles, 2, logs, "router-pair")),
            },
            pair,
        )


def measure(args: argparse.Namespace, options: Sequence[str], logs: Path) -> dict[str, Any]:
    """Run every load on both arms; returns the figures by load."""
    loads = {name: load for name, load in args.loads.items() if args.only in (None, name)}
    found: dict[str, Any] = {}
    with arms(args.gpus, [*options, "--disable-prefix-cache"], logs) as (urls, pair), ExitStack() as stack:
        clients = {
            arm: stack.enter_context(Clients(url, model_of(url), args.processes)) for arm, url in urls.items()
        }
        for name, load in loads.items():
            saturation = {arm: saturated(each, load, args) for arm, each in clients.items()}
            rate = args.load * min(saturation.values())
            runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in clients}
            found[name] = {"saturation_per_s": saturation, "rate": rate, "runs": runs}
            for repeat in range(args.repeats):
                for arm in list(clients)[:: 1 if repeat % 2 == 0 else -1]:
                    runs[arm].append(at(clients[arm], rate, load, args, seed=repeat))
                    print(f"{name}, repeat {repeat + 1} of {args.repeats}: {arm}", flush=True)
                counted = handover_of(pair.decode)
                found[name]["handover"] = {
                    key: counted[key] for key in ("num_adopted", "recomputed", "failed")
                }
                if args.gpus:
                    arguments = {key: value for key, value in vars(args).items() if key != "loads"}
                    report.save(f"gpu_pd_against_two_{name}", {"arguments": arguments, **found[name]})
    return found


def saturated(clients: Clients, load: Lengths | Mixture, args: argparse.Namespace) -> float:
    """Return the requests per second with so many at any time that the engines are never idle.

    Raises:
        RuntimeError: requests failed, or none ended in time.
    """
    run = clients.closed_loop(
        args.concurrency,
        args.saturate_seconds,
        lengths=load,
        max_requests=round(args.concurrency + 500 * args.saturate_seconds),
        seed=99,
    )
    found = run.summary(since=0.3 * args.saturate_seconds, until=args.saturate_seconds, slo=SLO())
    if found["failed"] or not found["tokens_per_event"]:
        raise RuntimeError(
            f"to saturate the engines, all requests must succeed and one must end within "
            f"{args.saturate_seconds:g} s; {found['failed']} failed, such as {found['errors']}, and "
            f"{sum(t.given_up for t in run.timelines)} did not end"
        )
    return float(found["events_per_s"] * found["tokens_per_event"] / load.mean_output)


def at(
    clients: Clients, rate: float, load: Lengths | Mixture, args: argparse.Namespace, seed: int
) -> dict[str, Any]:
    """Run one load; returns its summary, and one per class with that class's SLO."""
    run = clients.open_loop(rate, args.seconds, lengths=load, burstiness=1.0, seed=seed, patience=PATIENCE_S)
    since, until = WARM_UP * args.seconds, args.seconds
    classes = ("short", "long") if isinstance(load, Mixture) else ("",)
    by_class = {name: run.of(name).summary(since=since, until=until, slo=SLOS[name]) for name in classes}
    return run.summary(since=since, until=until, slo=SLOS[""]) | {
        "classes": by_class,
        "good_per_s": sum(each["good_per_s"] for each in by_class.values()),
    }


def medians(runs: Sequence[Mapping[str, Any]], label: str | None = None) -> dict[str, float]:
    """Return the medians over the repeats, in milliseconds, of one class or of all requests."""
    parts = [run if label is None else run["classes"][label] for run in runs]
    return {
        f"{name} {which}": 1e3 * statistics.median(part[key][which] for part in parts)
        for name, key in (("gap", "gap_s"), ("TTFT", "ttft_s"))
        for which in ("p50", "p99")
    }


def is_sound(found: Mapping[str, Any]) -> bool:
    """Whether the pair adopted all KV, and so was a pair."""
    return not any(load["handover"]["recomputed"] or load["handover"]["failed"] for load in found.values())


def judged(found: Mapping[str, Any]) -> dict[str, float]:
    """Return the p99 of the time between tokens of the pair by that of two engines, by load."""
    return {
        name: medians(load["runs"][PAIR])["gap p99"] / medians(load["runs"][TWO])["gap p99"]
        for name, load in found.items()
    }


def show(found: Mapping[str, Any]) -> None:
    """Print the figures."""
    rows = []
    for name, load in found.items():
        for arm, runs in load["runs"].items():
            for label in runs[0]["classes"]:
                times = [f"{value:.1f}" for value in medians(runs, label).values()]
                good = statistics.median(run["classes"][label]["good_per_s"] for run in runs)
                lost = sum(run["classes"][label][key] for run in runs for key in ("failed", "unfinished"))
                rows.append([arm, f"{name} {label}", f"{load['rate']:.2f}", *times, f"{good:.2f}", f"{lost}"])
    report.show("ms by class, medians of the repeats", COLUMNS, rows)
    saturation = [
        [arm, name, f"{rate:.2f}"]
        for name, load in found.items()
        for arm, rate in load["saturation_per_s"].items()
    ]
    report.show("saturation", ["", "load", "req/s"], saturation)
    ratios = [[name, f"{ratio:.3f}", f"{BAR}"] for name, ratio in judged(found).items()]
    report.show("gap p99, the pair by two engines", ["", "found", "bar"], ratios)
    for name, load in found.items():
        print(f"{name}: handed over since the start: {load['handover']}")
