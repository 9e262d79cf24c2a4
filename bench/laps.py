"""What length-aware prefill does to short and long prompts under one load, beside first come, first served.

    python -m bench.laps         # simulated: the pure scheduler on a device as fast as one H200, in seconds
    python -m bench.laps --serve [--model 8b] [--seconds 60] [--repeats 3] [--load 0.8]

95 % of the prompts are short, with 17 tokens in the median, and 5 % long, with 6,000. All are fresh. Each
asks for one token, as on a prefill worker (`--output` changes that). Requests come by a Poisson process, or
in bursts, at shares of the rate at which first come, first served is saturated. A request's time to first
token counts from when it was due.

Simulated, the arms are also those that LAPS decided against. Served, each arm has a server of its own on the
same device, of which only one is busy at a time, and the order is turned around with each repeat. JSON and a
chart go to bench/results.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from math import inf
from pathlib import Path
from typing import Any

from bench import plot, report, suite
from bench.launch import served
from bench.load import SLO, Clients, LogNormal, Mixture, arrivals, percentile
from bench.model_dir import with_tokenizer
from bench.serving import PATIENCE_S, WARM_UP, model_of
from bench.simulate import QWEN3_8B_H200, Arrival, Fate, Simulation, arrival
from segue.laps import pick
from segue.laps.pick import LapsPolicy, PrefillChoice, PrefillView
from segue.messages.control import EngineLimits, LapsLimits
from segue.scheduler.request import Request

FIRST_COME = "first come"
CLASSES = ("short", "long")
LOADS = (0.3, 0.6, 0.8, 0.9)
SATURATE_S = 30.0
LAPS = LapsLimits(threshold=256, long_share=0.2, slo_s=0.4, blocking_s=0.03, window_s=0.006)
COLUMNS = ["", "load", "requests/s", "short p50", "p99", "long p50", "p99"]

# --- simulated ---


class StrictShortFirst(LapsPolicy[Request]):
    """The rule of the published LAPS: short prompts in a batch of their own, as long as there are any."""

    def pick(self, view: PrefillView[Request], now: float) -> PrefillChoice[Request]:
        """Choose all short prompts, or else long ones; chunks have no limit but the step's."""
        started = [p for p in view.started if p.prompt_class == "short"]
        short = [*started, *view.short[: view.num_slots]]
        long = [*(p for p in view.started if p.prompt_class == "long"), *view.long[: view.num_slots]]
        return PrefillChoice(prompts=short or long, budget=view.budget)


class AlwaysAlone(LapsPolicy[Request]):
    """LAPS, whose short prompts never have a long one beside them."""

    def pick(self, view: PrefillView[Request], now: float) -> PrefillChoice[Request]:
        """Choose as LAPS does while prefill is not busy."""
        self._busy = pick.Rate()
        return super().pick(view, now)


def _limits(laps: LapsLimits | None) -> EngineLimits:
    return EngineLimits(
        num_pages=20_000,
        page_size=64,
        max_seq_len=32_768,
        max_running_requests=256,
        chunked_prefill_size=8192,
        step_sizes=list(range(64, 1025, 64)),
        laps=laps,
    )


def _simulation(arm: str, seed: int) -> Simulation:
    laps: dict[str, LapsLimits | None] = {
        FIRST_COME: None,
        "no chunk limit": LapsLimits(**_fields(LAPS) | {"blocking_s": 1e3}),
        "no window": LapsLimits(**_fields(LAPS) | {"window_s": 0.0}),
    }
    policies: dict[str, type[LapsPolicy[Request]]] = {
        "strict short first": StrictShortFirst,
        "always alone": AlwaysAlone,
    }
    rng = random.Random(seed)
    made = Simulation(
        limits=_limits(laps.get(arm, LAPS)), truth=QWEN3_8B_H200, noise=lambda: rng.uniform(0.95, 1.05)
    )
    if arm in policies:
        planner, limits = made.scheduler._prefill, made.limits
        planner.policy = policies[arm](LAPS, made.scheduler.cost, limits.page_size, limits.step_sizes)
    return made


def _fields(limits: LapsLimits) -> dict[str, Any]:
    return {name: getattr(limits, name) for name in limits.__struct_fields__}


SIMULATED = (FIRST_COME, "laps", "no chunk limit", "no window", "always alone", "strict short first")


def simulate(args: argparse.Namespace) -> dict[str, Any]:
    """Run every arm at every load; returns the figures by arm and load."""
    workload = _workload(args)

    def load(rate: float, seed: int) -> list[Arrival]:
        rng = random.Random(seed)
        due = [0.0] * 2000 if rate == inf else arrivals(rate, args.seconds, args.burstiness, rng)
        return [arrival(workload, rng, at, number) for number, at in enumerate(due)]

    def rate_of(fates: Sequence[Fate]) -> float:
        return len(fates) / max(fate.arrival.at + fate.end for fate in fates)

    saturation = {arm: rate_of(_simulation(arm, 0).run(load(inf, 0))) for arm in SIMULATED}
    runs: list[dict[str, Any]] = []
    for arm in SIMULATED:
        for share in args.load:
            found: dict[str, list[float]] = {name: [] for name in CLASSES}
            for seed in range(args.repeats):
                for fate in _simulation(arm, seed).run(load(share * saturation[FIRST_COME], seed)):
                    found["short" if len(fate.arrival.prompt) <= LAPS.threshold else "long"].append(
                        fate.first
                    )
            runs.append({"arm": arm, "load": share, "rate": share * saturation[FIRST_COME], **_ttft(found)})
    return {"saturation_per_s": saturation, "runs": runs}


# --- served ---


ARMS: dict[str, list[str]] = {
    FIRST_COME: [],
    "laps": ["--enable-laps-scheduler"],
    "no window": ["--enable-laps-scheduler", "--laps-window-ms", "0"],
}


def serve(args: argparse.Namespace) -> dict[str, Any]:
    """Serve every arm at every load; returns the figures by arm and load, medians over the repeats.

    All servers run from the start to the end, and only one of them has something to do at any time.
    """
    workload = _workload(args)
    with ExitStack() as stack:
        options = ["--disable-prefix-cache", *args.option]
        if args.model in suite.SHAPES:
            model = stack.enter_context(with_tokenizer(Path(suite.model_dir(args.model))))
            options += ["--model", str(model), "--load-format", "dummy"]
        elif args.model is not None:
            options += ["--model", args.model]
        arms = {}
        for arm in args.arms:
            url = stack.enter_context(served(*options, *ARMS[arm]))
            arms[arm] = stack.enter_context(Clients(url, model_of(url), args.processes))
        saturation = {arm: _saturation(clients, workload, args) for arm, clients in arms.items()}
        found: dict[tuple[str, float], list[dict[str, Any]]] = {}
        for repeat in range(args.repeats):
            for arm in list(arms)[:: 1 if repeat % 2 == 0 else -1]:
                for share in args.load:
                    rate = args.rate or share * saturation[FIRST_COME]
                    found.setdefault((arm, share), []).append(
                        _at(arms[arm], rate, workload, args, seed=repeat)
                    )
                    print(f"repeat {repeat + 1} of {args.repeats}: {arm} at {share:.0%}", flush=True)
    runs = [
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
    return {"saturation_per_s": saturation, "runs": runs}


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
    """Return the requests per second with so many at any time that the server is never idle."""
    seconds = min(args.seconds, SATURATE_S)
    run = clients.closed_loop(
        args.concurrency, seconds, lengths=workload, max_requests=args.max_requests, seed=99
    )
    found = run.summary(since=0.3 * seconds, until=seconds, slo=SLO())
    return found["events_per_s"] * found["tokens_per_event"] / workload.mean_output


# --- both ---


def _workload(args: argparse.Namespace) -> Mixture:
    median, least, most = args.long
    return Mixture(
        long=LogNormal(median=median, sigma=0.6, least=least, most=most), output=tuple(args.output)
    )


def _ttft(seconds: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """Return the quantiles of the times to first token of each class, in seconds."""
    return {
        name: {f"p{q}": percentile(values, q / 100) for q in (50, 90, 99)} for name, values in seconds.items()
    }


def row(run: Mapping[str, Any]) -> list[str]:
    """Return one line of the table, in milliseconds."""
    times = [f"{1e3 * run[name][which]:.0f}" for name in CLASSES for which in ("p50", "p99")]
    return [run["arm"], f"{run['load']:.0%}", f"{run['rate']:.1f}", *times]


def draw(name: str, runs: Sequence[Mapping[str, Any]]) -> None:
    """Draw the time to first token of each class over the load, one curve per arm."""
    panels = {
        f"{kind} prompts: time to first token, {which}, ms": {
            arm: [(100 * run["load"], 1e3 * run[kind][which]) for run in runs if run["arm"] == arm]
            for arm in dict.fromkeys(run["arm"] for run in runs)
        }
        for kind in CLASSES
        for which in ("p50", "p99")
    }
    plot.charts(report.RESULTS / f"{name}.svg", panels, "load, % of the saturation of first come")


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--serve", action="store_true", help="real servers instead of a simulated device")
    parser.add_argument("--model", help="0.6b or 8b, with dummy weights, or as in segue serve")
    parser.add_argument(
        "--option", action="append", default=[], help="for every server, like --option=--num-kv-tokens=200000"
    )
    parser.add_argument("--load", type=float, action="append", help="share of the saturation; several")
    parser.add_argument("--rate", type=float, help="requests per second, in place of --load")
    parser.add_argument("--arms", nargs="+", choices=sorted(ARMS), default=[FIRST_COME, "laps"])
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of arrivals")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=int, nargs=2, default=(1, 1), metavar=("MIN", "MAX"))
    parser.add_argument(
        "--long",
        type=int,
        nargs=3,
        default=(6000, 2000, 16_000),
        metavar=("MEDIAN", "LEAST", "MOST"),
        help="tokens of long prompts; fewer for a CPU",
    )
    parser.add_argument("--burstiness", type=float, default=1.0, help="1: Poisson; less: in bursts")
    parser.add_argument("--concurrency", type=int, default=128, help="requests at any time, to saturate")
    parser.add_argument("--max-requests", type=int, default=20_000, help="prepared to saturate a server")
    parser.add_argument("--processes", type=int, default=4, help="client processes")
    parser.add_argument("--name", help="of the files in bench/results; default: laps, or laps_simulated")
    args = parser.parse_args()
    args.load = args.load or list(LOADS)
    name = args.name or ("laps" if args.serve else "laps_simulated")
    measure: Callable[[argparse.Namespace], dict[str, Any]] = serve if args.serve else simulate
    found = measure(args)
    print(f"written to {report.save(name, {'arguments': vars(args), **found})}")
    report.show("time to first token, ms", COLUMNS, [row(run) for run in found["runs"]])
    saturation = [[arm, f"{rate:.1f}"] for arm, rate in found["saturation_per_s"].items()]
    report.show("saturation", ["", "requests/s"], saturation)
    draw(name, found["runs"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
