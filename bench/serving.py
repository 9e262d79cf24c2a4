"""Sends requests at a rate to any OpenAI-compatible server, and measures how long their tokens take.

    python -m bench.serving http://127.0.0.1:30000 --rate 5 --rate 10 [--burstiness 0.5]

The load is open loop: requests come by a Poisson process, or in bursts (Gamma), whether or not others are
answered. Prompts are random token ids, and outputs have exactly the requested length. Figures per rate: the
time from when a request was due to its first token, the gaps between tokens, and the time to the end, as p50,
p90 and p99; and goodput, the requests per second that kept the SLO. `--long-prompt` adds a long prompt among
decoding streams. JSON and SVG go to bench/results.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bench import intrusion, plot, report
from bench.intrusion import Intrusion
from segue.bench import client
from segue.bench.client import Client
from segue.bench.load import SLO, Clients, Lengths
from segue.bench.serving import COLUMNS, TITLE, at_rate, model_of, row


def long_prompt(url: str, model: str, scene: Intrusion) -> dict[str, Any]:
    """Measure the gaps of decoding streams at a long prompt."""
    return asyncio.run(intrusion.measure(Client(url, model), scene))


def draw(name: str, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Draw latency over rate, one curve per server."""

    def curves(kind: str, which: str) -> dict[str, list[tuple[float, float]]]:
        return {side: [(run["rate"], 1e3 * run[kind][which]) for run in runs] for side, runs in found.items()}

    panels = {
        "time to first token, p50, ms": curves("ttft_s", "p50"),
        "time to first token, p99, ms": curves("ttft_s", "p99"),
        "gap between tokens, p50, ms": curves("gap_s", "p50"),
        "gap between tokens, p99, ms": curves("gap_s", "p99"),
    }
    plot.charts(report.RESULTS / f"{name}.svg", panels, "requests per second")


def positive(text: str) -> float:
    """Parse a number above 0, for argparse."""
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return float(text)


def base_url(text: str) -> str:
    """Parse a server's URL, for argparse, and remove the path /v1."""
    try:
        return client.base_url(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main() -> int:
    """Run the benchmark; the exit code is 1 if a request failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", type=base_url, help="http://host:port")
    parser.add_argument("--rate", type=positive, action="append", required=True, help="requests per second")
    parser.add_argument("--burstiness", type=positive, default=1.0, help="1: Poisson; less: in bursts")
    parser.add_argument("--seconds", type=positive, default=20.0, help="seconds of arrivals, for each rate")
    parser.add_argument("--prompt", type=int, nargs=2, default=Lengths().prompt, metavar=("MIN", "MAX"))
    parser.add_argument("--output", type=int, nargs=2, default=Lengths().output, metavar=("MIN", "MAX"))
    parser.add_argument("--max-id", type=int, default=Lengths().max_id, help="largest token id of a prompt")
    parser.add_argument("--text", action="store_true", help="text prompts, for servers without token ids")
    parser.add_argument("--slo-ttft", type=float, default=SLO().ttft, help="seconds")
    parser.add_argument("--slo-gap", type=float, default=SLO().gap, help="seconds, in 99 of 100 gaps")
    parser.add_argument("--long-prompt", type=int, help="tokens of a prompt among 64 decoding streams")
    parser.add_argument("--chunk", type=int, default=Intrusion().chunk, help="prompt tokens per step")
    parser.add_argument("--processes", type=int, default=4, help="client processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="serving", help="name of the files in bench/results")
    args = parser.parse_args()
    for name in ("prompt", "output"):
        if not 1 <= getattr(args, name)[0] <= getattr(args, name)[1]:
            parser.error(f"--{name}: give MIN and MAX, 1 or more, in this order")
    if args.long_prompt and args.text:
        parser.error("--long-prompt uses token ids, so it cannot be combined with --text")
    lengths = Lengths(
        prompt=tuple(args.prompt), output=tuple(args.output), max_id=args.max_id, text=args.text
    )
    slo = SLO(ttft=args.slo_ttft, gap=args.slo_gap)
    model = model_of(args.url)
    runs = []
    with Clients(args.url, model, args.processes) as clients:
        for rate in args.rate:
            runs.append(
                at_rate(
                    clients,
                    rate,
                    seconds=args.seconds,
                    lengths=lengths,
                    burstiness=args.burstiness,
                    slo=slo,
                    seed=args.seed,
                )
            )
    report.show(TITLE, COLUMNS, [row(model, run) for run in runs])
    figures: dict[str, Any] = {"arguments": vars(args), "model": model, "rates": runs}
    report.save(args.name, figures)  # in case the long prompt fails
    if args.long_prompt:
        chunk = min(args.chunk, args.long_prompt)
        scene = Intrusion(prompt=args.long_prompt, chunk=chunk, max_id=args.max_id)
        figures["long prompt"] = long_prompt(args.url, model, scene)
        print(figures["long prompt"])
    print(f"written to {report.save(args.name, figures)}")
    draw(args.name, {model: runs})
    return 1 if any(run["failed"] for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
