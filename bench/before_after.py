"""Measures two commits of Segue against each other on this machine: is the later one slower?

    python -m bench.before_after BEFORE [AFTER] [--what host_cost serving_cost load] [--blocks 10]

Both commits are checked out beside each other. Each block measures A B C C B A, where A is BEFORE, B is
AFTER, and C is BEFORE once more, in processes of its own. A drift of the machine within a block cancels out
of B / A and of C / A. A figure's change is the median of B / A over the blocks. Its spread is the median over
the blocks of how far C / A is from 1. The later commit is worse if it loses more than 2 % and more than the
spread.

`host_cost` is that bench of each commit, in milliseconds per step. `serving_cost` is the served half of that
bench: tokens per second of 8 concurrent streams. `load` sends short requests at a fixed rate, as
`bench.serving` does. `cpu_speed` measures over HTTP what `bench.cpu_vs_transformers` measures of Segue.
Every value and ratio is stored in bench/results/before_after_*.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from bench import cpu_vs_transformers, launch, report, workload
from bench.serving_cost import NUM_STREAMS, PROMPT_LEN, served_speed
from segue.bench.load import SLO, Clients, Lengths
from segue.bench.serving import at_rate, model_of

TOLERATED = 0.02
ORDER = ("before", "after", "before again", "before again", "after", "before")
LOAD = Lengths(prompt=(16, 128), output=(8, 32))
LOAD_RATE, LOAD_SECONDS = 3.0, 12.0  # requests per second; seconds of arrivals

Figures = dict[str, float]
Measure = Callable[[], Figures]


def main() -> int:
    """Compare the commits; the exit code is 1 if a figure is worse by more than TOLERATED and its spread."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", help="a commit")
    parser.add_argument("after", nargs="?", default="HEAD", help="a commit; default: HEAD")
    parser.add_argument("--what", nargs="+", choices=sorted(BENCHES), default=sorted(BENCHES))
    parser.add_argument("--blocks", type=int, default=10)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the servers are stopped
    commits = {"before": _commit(args.before), "after": _commit(args.after)}
    found: dict[str, Any] = {}
    with _checked_out(commits["before"]) as before, _checked_out(commits["after"]) as after:
        trees = {"before": before, "before again": before, "after": after}
        for what in args.what:
            blocks = []
            for number in range(args.blocks):
                with BENCHES[what](trees) as measures:
                    blocks.append([(side, measures[side]()) for side in ORDER])
                found[what] = {name: compared(blocks, name) for name in blocks[0][0][1]}
                path = report.save(
                    f"before_after_{what}", {**commits, "blocks": len(blocks), "figures": found[what]}
                )
                print(f"{what}: block {number + 1} of {args.blocks}, written to {path}", flush=True)
    rows = [
        [
            f"{what}, {name}",
            f"{each['change']:+.1%}",
            f"{each['spread']:.1%}",
            "worse" if each["worse"] else "",
        ]
        for what, figures in found.items()
        for name, each in figures.items()
    ]
    report.show("change from before to after, medians", ["", "change", "spread of A against A", ""], rows)
    return 1 if any(each["worse"] for figures in found.values() for each in figures.values()) else 0


def compared(blocks: list[list[tuple[str, Figures]]], name: str) -> dict[str, Any]:
    """Summarise one figure over all blocks: its values and ratios, the change, the spread and the verdict."""
    ratios: dict[str, list[float]] = {"after": [], "before again": []}
    values: dict[str, list[float]] = {side: [] for side in set(ORDER)}
    for block in blocks:
        sums = dict.fromkeys(values, 0.0)
        for side, figures in block:
            values[side].append(figures[name])
            sums[side] += figures[name]
        for side, each in ratios.items():
            each.append(sums[side] / sums["before"])
    change = statistics.median(ratios["after"]) - 1
    spread = statistics.median(abs(ratio - 1) for ratio in ratios["before again"])
    loss = -change if name.endswith("/s") else change
    return {
        "change": change,
        "spread": spread,
        "worse": loss > max(TOLERATED, spread),
        "ratios": ratios,
        "values": values,
    }


@contextmanager
def _host_cost(trees: dict[str, Path]) -> Iterator[dict[str, Measure]]:
    """Yield the measure of each side's own `bench.host_cost`, run as a command in its tree."""

    def measured(tree: Path) -> Figures:
        command = [sys.executable, "-m", "bench.host_cost"]
        done = subprocess.run(command, cwd=tree, env=_environment(tree), stdout=subprocess.DEVNULL)
        # Exit code 1 says that the benchmark's own bar was missed; its figures count all the same.
        if done.returncode not in (0, 1):
            raise RuntimeError(f"{' '.join(command)} ended with exit code {done.returncode} in {tree}")
        record = json.loads((tree / "bench/results/host_cost.json").read_text())
        return {f"page size {size}, ms": record[f"page size {size}"]["total"] for size in (16, 64)}

    yield {side: partial(measured, tree) for side, tree in trees.items()}


@contextmanager
def _serving_cost(trees: dict[str, Path]) -> Iterator[dict[str, Measure]]:
    """Yield the measure of each side's server: the tokens per second of several streams over HTTP."""
    with _servers(trees) as urls:
        batch = workload.prompts(NUM_STREAMS, PROMPT_LEN, seed=0)
        measures: dict[str, Measure] = {}
        for side, url in urls.items():
            model = model_of(url)
            served_speed(url, model, batch)  # warms up
            measures[side] = partial(_served, url, model, batch)
        yield measures


@contextmanager
def _cpu_speed(trees: dict[str, Path]) -> Iterator[dict[str, Measure]]:
    """Yield the measure of each side's server: tokens per second of prefill and decode, without streams."""
    with _servers(trees) as urls, httpx.Client(timeout=300) as client:
        sides = {side: partial(_generate, client, url) for side, url in urls.items()}
        for generate in sides.values():
            _speeds(generate)  # warms up
        yield {side: partial(_speeds, generate) for side, generate in sides.items()}


def _generate(client: httpx.Client, url: str, batch: list[list[int]], num_tokens: int) -> None:
    """Make `num_tokens` tokens for each prompt of `batch`, in one call of the native API."""
    body = {"input_ids": batch, "sampling_params": workload.greedy(num_tokens)}
    client.post(f"{url}/generate", json=body).raise_for_status()


def _speeds(generate: cpu_vs_transformers.Generate) -> Figures:
    """Return the tokens per second of each measure of `bench.cpu_vs_transformers`."""
    return {
        f"{each.name}, tokens/s": cpu_vs_transformers.tokens_per_second(generate, each, seed=0)
        for each in cpu_vs_transformers.MEASURES
    }


@contextmanager
def _load(trees: dict[str, Path]) -> Iterator[dict[str, Measure]]:
    """Yield the measure of each side's server: the latencies under an open-loop load of streams."""
    with _servers(trees) as urls, ExitStack() as stack:
        measures: dict[str, Measure] = {}
        for side, url in urls.items():
            clients = stack.enter_context(Clients(url, model_of(url), 1))
            measures[side] = partial(_loaded, clients, LOAD_SECONDS)
            _loaded(clients, 3.0)  # warms up
        yield measures


def _served(url: str, model: str, batch: list[list[int]]) -> Figures:
    return {"tokens/s": served_speed(url, model, batch)}


def _loaded(clients: Clients, seconds: float) -> Figures:
    """Put the load on a server for `seconds` and return the medians of its latencies, in ms.

    Raises:
        RuntimeError: a request failed or did not end, so the latencies say nothing.
    """
    found = at_rate(clients, LOAD_RATE, seconds=seconds, lengths=LOAD, burstiness=1.0, slo=SLO(), seed=0)
    if found["failed"] or found["unfinished"]:
        raise RuntimeError(f"{found['failed']} requests failed, {found['unfinished']} did not end: {found}")
    return {
        "first token p50, ms": 1e3 * found["ttft_s"]["p50"],
        "gap p50, ms": 1e3 * found["gap_s"]["p50"],
        "whole request p50, ms": 1e3 * found["end_s"]["p50"],
    }


@contextmanager
def _servers(trees: dict[str, Path]) -> Iterator[dict[str, str]]:
    """Start a fresh server per side and yield their URLs; only the server that is measured gets requests."""
    with ExitStack() as stack:
        urls = {}
        for side, tree in trees.items():
            port = launch.free_port()
            options = (
                "--port",
                str(port),
                "--dtype",
                "bfloat16",
                "--disable-prefix-cache",
                "--log-level",
                "error",
            )
            urls[side] = f"http://127.0.0.1:{port}"
            command = [sys.executable, "-m", "segue", "serve", *options]
            stack.enter_context(launch.running(command, urls[side], env=_environment(tree)))
        yield urls


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}


def _commit(name: str) -> str:
    return _git("rev-parse", "--short=12", f"{name}^{{commit}}")


@contextmanager
def _checked_out(commit: str) -> Iterator[Path]:
    """Yield a temporary directory with the files of `commit`, a git worktree that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="segue-before-after-") as directory:
        tree = Path(directory) / "tree"
        _git("worktree", "add", "--detach", "--quiet", str(tree), commit)
        try:
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=report.RESULTS.parent, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


BENCHES = {"host_cost": _host_cost, "serving_cost": _serving_cost, "cpu_speed": _cpu_speed, "load": _load}


if __name__ == "__main__":
    sys.exit(main())
