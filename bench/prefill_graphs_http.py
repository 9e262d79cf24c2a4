"""Measures prompts behind a cached history with each mode of prefill graphs, over HTTP.

    python -m bench.prefill_graphs_http [--models 8b 0.6b] [--seconds 3] [--repeats 3]

Each prompt begins with one of a few histories, which the prefix cache has, and goes on with fresh tokens, as
a later turn of a chat does. 95 % of the fresh parts are short (17 tokens in the median), and 5 % are long
(2,000). Each request asks for one token, as on a prefill worker, and four clients each send their next
request when they have that token. The models have dummy weights.

`ragged` is the default: graphs by the total tokens of a step. `grid` is --enable-batch-prefill-cuda-graph:
one slot per prompt if at most half is padding, else as ragged. `grid alone`: as grid, else without a graph.
The option should take at most 3 % longer than the better of the other two. All servers of a model run at the
same time, but only one of them has something to do. JSON goes to bench/results after each model.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench import report, suite
from bench.launch import served
from bench.model_dir import with_tokenizer
from segue.bench.load import SLO, Clients, LogNormal, Mixture, Run
from segue.bench.serving import WARM_UP, model_of

MODES: dict[str, list[str]] = {
    "ragged": [],
    "grid": ["--enable-batch-prefill-cuda-graph"],
    "grid alone": ["--enable-batch-prefill-cuda-graph", "--precompile-token-paddings", "1"],
}
OPTIONS = ["--load-format", "dummy", "--max-model-len", "16384", "--num-kv-tokens", "80000"]
OPTIONS += ["--max-running-requests", "32"]
MIXTURE = Mixture(long=LogNormal(median=2000, sigma=0.6, least=1000, most=6000))
HISTORIES, NUM_PREFIXES = (0, 512, 4096), 8  # tokens; how many different ones
CLASSES, CONCURRENCY = ("short", "long"), 4
REQUESTS_PER_S = 1200  # more than any server gives; so many are prepared
BAR = 1.03
# Labels of the counters that say how a step has run.
STEPS = {"segue:graph_hit_total": "kind", "segue:eager_total": "reason"}
TOKENS = {
    "segue:prefix_cache_queries_total": "prompt_tokens",
    "segue:prefix_cache_hits_total": "cached_tokens",
    "segue:padded_tokens_total": "padded_tokens",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One server, and the clients that put a load on it."""

    url: str
    clients: Clients

    def counters(self) -> dict[str, float]:
        """Return the number of steps by kind of graph (or by the reason for none), and those of tokens."""
        text = httpx.get(f"{self.url}/metrics", timeout=10).raise_for_status().text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        steps = {
            f"steps {s.labels[STEPS[s.name]]}": s.value for s in samples if s.name in STEPS and s.value > 0
        }
        return steps | {TOKENS[s.name]: s.value for s in samples if s.name in TOKENS}

    def compute(self, prompts: Sequence[Sequence[int]]) -> None:
        """Compute prompts, one after the other, so that the prefix cache has them."""
        for prompt in prompts:
            body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}}
            httpx.post(f"{self.url}/generate", json=body, timeout=60).raise_for_status()


def measure(
    targets: Mapping[str, Target], mixture: Mixture, histories: Sequence[int], seconds: float, repeats: int
) -> list[dict[str, Any]]:
    """Put the same loads on all servers in turns; return the figures by history and mode.

    Args:
        targets: the servers by mode.
        mixture: the fresh part of the prompts.
        histories: the tokens before the fresh part.
        seconds: of each load.
        repeats: of each load; the order of the servers is turned around with each.
    """
    found = []
    for history in histories:
        rng = random.Random(history)
        prefixes = [
            [rng.randint(0, mixture.max_id) for _ in range(history)] for _ in range(NUM_PREFIXES) if history
        ]
        workload = replace(mixture, prefixes=prefixes)
        runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in targets}
        for target in targets.values():
            target.compute([[*prefix, 1] for prefix in prefixes])
        for repeat in range(repeats):
            for mode in list(targets)[:: 1 if repeat % 2 == 0 else -1]:
                runs[mode].append(_load(targets[mode], workload, seconds, seed=repeat))
                print(f"{history} tokens of history, repeat {repeat + 1} of {repeats}: {mode}", flush=True)
        found += [{"history": history, "mode": mode, **_medians(each)} for mode, each in runs.items()]
    return found


def _load(target: Target, workload: Mixture, seconds: float, seed: int) -> dict[str, Any]:
    """Run one load on one server; return the times to first token, in ms, and what its steps were."""
    before = target.counters()
    run: Run = target.clients.closed_loop(
        CONCURRENCY,
        seconds,
        lengths=workload,
        max_requests=max(CONCURRENCY + 1, round(REQUESTS_PER_S * seconds)),
        seed=seed,
    )
    after = target.counters()
    counted = {name: value - before.get(name, 0) for name, value in after.items()}
    figures: dict[str, Any] = {}
    for name in CLASSES:
        summary = run.of(name).summary(since=WARM_UP * seconds, until=seconds, slo=SLO())
        for which in ("p50", "p99"):
            figures[f"{name} {which}"] = round(1e3 * summary["ttft_s"][which], 3)
    ended = [t for t in run.timelines if t.error is None and not t.given_up]
    errors = [t.error for t in run.timelines if t.error is not None]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(run.timelines)} requests failed: {errors[0]}")
    return figures | {
        "requests_per_s": round(len(ended) / seconds, 1),
        "cached_share": round(counted["cached_tokens"] / max(1, counted["prompt_tokens"]), 4),
        "steps": {name.removeprefix("steps "): n for name, n in counted.items() if name.startswith("steps ")},
        "padded_tokens": counted["padded_tokens"],
    }


def _medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the medians of the numbers of repeated loads, their sums of steps, and the loads themselves."""
    numbers = {
        name: statistics.median(run[name] for run in runs)
        for name, value in runs[0].items()
        if isinstance(value, float)
    }
    kinds = sorted({kind for run in runs for kind in run["steps"]})
    steps = {kind: sum(run["steps"].get(kind, 0) for run in runs) for kind in kinds}
    return {**numbers, "steps": steps, "repeats": list(runs)}


def ratios(rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return, by history, the median time to first token of short prompts: of `grid` by the better other."""
    by_history: dict[int, dict[str, float]] = {}
    for row in rows:
        by_history.setdefault(row["history"], {})[row["mode"]] = row["short p50"]
    return {
        history: times["grid"] / min(time for mode, time in times.items() if mode != "grid")
        for history, times in by_history.items()
    }


def show(model: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print one line per history and mode."""
    columns = ["short p50", "short p99", "long p50", "long p99", "requests_per_s", "cached_share"]
    lines = [
        [f"{row['mode']}, {row['history']}", *(f"{row[name]:g}" for name in columns), _steps(row["steps"])]
        for row in rows
    ]
    report.show(f"{model}: time to first token, ms", ["mode, history", *columns, "steps"], lines)


def _steps(steps: Mapping[str, float]) -> str:
    return " ".join(f"{kind} {count:.0f}" for kind, count in steps.items() if count)


def main() -> int:
    """Run all models; returns 1 if the option is slower than the bar allows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=sorted(suite.SHAPES), default=["8b", "0.6b"])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for model in args.models:
        with ExitStack() as stack:
            path = stack.enter_context(with_tokenizer(Path(suite.model_dir(model))))
            targets = {}
            for mode, options in MODES.items():
                url = stack.enter_context(served("--model", str(path), *OPTIONS, *options))
                clients = stack.enter_context(Clients(url, model_of(url), 2))
                targets[mode] = Target(url=url, clients=clients)
            rows = measure(targets, MIXTURE, HISTORIES, args.seconds, args.repeats)
        found[model] = {"figures": rows, "option by the better other": ratios(rows)}
        show(model, rows)
        path = report.save("gpu_prefill_graphs_http", {"arguments": vars(args), "bar": BAR, **found})
        print(f"written to {path}", flush=True)
    worst = max(ratio for model in found.values() for ratio in model["option by the better other"].values())
    print(f"the option takes at most {worst:.3f} times as long as the better of the others; the bar is {BAR}")
    return int(worst > BAR)


if __name__ == "__main__":
    sys.exit(main())
