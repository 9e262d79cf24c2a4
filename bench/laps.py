"""What length-aware prefill does to short and long prompts under one load, beside first come, first served.

    python -m bench.laps         # simulated: the pure scheduler on a device as fast as one H200; a minute
    python -m bench.laps --serve [--model 8b] [--seconds 60] [--repeats 3] [--load 0.8]
                                 [--url NAME=URL …] [--theirs NAME=COMMAND …]

95 % of the prompts are short, with 17 tokens in the median, and 5 % long, with 6,000. All are fresh. Each
asks for one token, as on a prefill worker (`--output` changes that). Requests come by a Poisson process, or
in bursts, at shares of the rate at which first come, first served is saturated. A request's time to first
token counts from when it was due.

Simulated, the arms are also those that LAPS decided against. Served, each arm has a server of its own on the
same device, of which only one is busy at a time, and the order is turned around with each repeat. `--url`
adds servers that run already, of this engine or of another one, and `--theirs` starts some; the arms `vllm`
and `vllm tuned` have bars. JSON and a chart go to bench/results. `--add` adds arms and repeats to those that
are there, where one command or one device has no room for all of them.

At the saturation there are always 128 requests, or `--concurrency`, and the prompt tokens of those that end
are counted. It is given in requests per second with the mean number of prompt tokens.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bench import plot, report
from bench.laps_served import ARMS, CLASSES, FIRST_COME, LAPS, judged, named_command, named_url, serve
from bench.simulate import HOST_OF_H200, QWEN3_8B_H200, Arrival, Simulation, arrival, saturation
from segue.bench.load import LogNormal, Mixture, arrivals, percentile
from segue.laps.pick import LapsPolicy, PrefillChoice, PrefillView
from segue.laps.window import Rate
from segue.messages.control import EngineLimits, LapsLimits
from segue.scheduler.request import Request

LOADS = (0.3, 0.6, 0.8, 0.9)
LIMITS = LapsLimits(threshold=256, long_share=0.2, slo_s=0.4, blocking_s=0.06, window_s=0.006)
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
        self._busy = Rate()
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
        "no chunk limit": LapsLimits(**_fields(LIMITS) | {"blocking_s": 1e3}),
        "no window": LapsLimits(**_fields(LIMITS) | {"window_s": 0.0}),
    }
    policies: dict[str, type[LapsPolicy[Request]]] = {
        "strict short first": StrictShortFirst,
        "always alone": AlwaysAlone,
    }
    rng = random.Random(seed)
    made = Simulation(
        limits=_limits(laps.get(arm, LIMITS)),
        truth=QWEN3_8B_H200,
        host=HOST_OF_H200,
        noise=lambda: rng.uniform(0.95, 1.05),
    )
    if arm in policies:
        planner, limits = made.scheduler._prefill, made.limits
        planner.policy = policies[arm](LIMITS, made.scheduler.cost, limits.page_size, limits.step_sizes)
    return made


def _fields(limits: LapsLimits) -> dict[str, Any]:
    return {name: getattr(limits, name) for name in limits.__struct_fields__}


SIMULATED = (FIRST_COME, LAPS, "no chunk limit", "no window", "always alone", "strict short first")


def simulate(args: argparse.Namespace) -> dict[str, Any]:
    """Run every arm at every load; returns the figures by arm and load."""
    workload = _workload(args)

    def load(rate: float, seed: int) -> list[Arrival]:
        rng = random.Random(seed)
        due = arrivals(rate, args.seconds, args.burstiness, rng)
        return [arrival(workload, rng, at, number) for number, at in enumerate(due)]

    saturated = {
        arm: saturation(_simulation(arm, 0), workload, args.concurrency, args.seconds) for arm in SIMULATED
    }
    runs: list[dict[str, Any]] = []
    for arm in SIMULATED:
        for share in args.load:
            found: dict[str, list[float]] = {name: [] for name in CLASSES}
            for seed in range(args.repeats):
                for fate in _simulation(arm, seed).run(load(share * saturated[FIRST_COME], seed)):
                    found["short" if len(fate.arrival.prompt) <= LIMITS.threshold else "long"].append(
                        fate.first
                    )
            runs.append({"arm": arm, "load": share, "rate": share * saturated[FIRST_COME], **_ttft(found)})
    return {"saturation_per_s": saturated, "runs": runs}


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
    """Run the benchmark; the exit code is 1 if a bar is missed."""
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
    parser.add_argument("--arms", nargs="*", choices=sorted(ARMS), default=[FIRST_COME, LAPS])
    parser.add_argument(
        "--url",
        action="append",
        type=named_url,
        default=[],
        metavar="NAME=URL",
        help="one more arm: a server that runs already; several",
    )
    parser.add_argument(
        "--theirs",
        type=named_command,
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="one more arm: a server that COMMAND starts, in which {model} and {port} are replaced; several",
    )
    parser.add_argument(
        "--add", action="store_true", help="add arms and repeats to the saved ones, at their saturation"
    )
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
    if args.serve and args.rate is None and not args.add and FIRST_COME not in args.arms:
        parser.error(f"a share of the load needs the arm {FIRST_COME!r}; add it, or give --rate")
    found = serve(args, _workload(args), name) if args.serve else simulate(args)
    print(f"written to {report.save(name, {'arguments': vars(args), **found})}")
    report.show("time to first token, ms", COLUMNS, [row(run) for run in found["runs"]])
    saturation = [[arm, f"{rate:.1f}"] for arm, rate in found["saturation_per_s"].items()]
    report.show("saturation", ["", "requests/s"], saturation)
    draw(name, found["runs"])
    bars = judged(found["runs"])
    if bars:
        rows = [[label, f"{ratio:.3f}", f"{bar}"] for label, ratio, bar in bars]
        report.show("short prompts, p99: LAPS by another server", ["", "found", "bar"], rows)
    return int(any(ratio > bar for _, ratio, bar in bars))


if __name__ == "__main__":
    sys.exit(main())
