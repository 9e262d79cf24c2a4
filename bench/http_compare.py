r"""Runs the same loads on another engine's server and on Segue's, and compares the figures with bars.

    python -m bench.http_compare MODEL --theirs "python3 -m other.server --model {model} --port {port}"

MODEL is a directory with a config.json; if it has no tokenizer, an artificial one is used. Each server in
turn gets three loads: a constant number of requests that saturates it; Poisson arrivals at 50 and 80 % of the
rate that the first server reached; a long prompt while others decode. Results are written after every part.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from bench import launch, report, serving
from bench.intrusion import Intrusion
from bench.model_dir import with_tokenizer
from segue.bench.load import SLO, Clients, Lengths
from segue.bench.serving import COLUMNS, TITLE, at_rate, model_of, row, saturated

SHARES = (0.5, 0.8)  # of the rate at saturation
_OPEN = tuple(f"{share:.0%}" for share in SHARES)
TTFT_BAR, GAP_BAR = 0.7, 0.8  # Segue's value over the other's: p50 of the first token, p99 of the gap
WARM_UP_S = 3.0
CONCURRENCY = 256
MAX_RATE = 150  # requests per second; no saturated server answers more

OURS = (
    f"{sys.executable} -m segue serve --model {{model}} --port {{port}} --load-format dummy --dtype bfloat16 "
    "--max-model-len 20000 --disable-prefix-cache --log-level warning"
)

Side = dict[str, Any]
"""The results of one server: command, version, ready_s, loads, long_prompt, exceptions by part, clocks."""


class Comparison:
    """One run of the comparison; the results so far are on disk."""

    def __init__(self, args: argparse.Namespace, model: Path) -> None:
        self.sides: dict[str, Side] = {}
        self._args, self._model = args, model
        self._lengths = Lengths(max_id=args.max_id)

    def measure(self, name: str, command: str) -> None:
        """Run all parts on one server; if a part fails, store its exception and run the next part."""
        args, port = self._args, launch.free_port()
        url = f"http://127.0.0.1:{port}"
        side: Side = {"command": command, "loads": {}, "exceptions": {}}
        self.sides[name] = side
        words = launch.filled(command, model=str(self._model), port=port)
        log = report.RESULTS / f"{args.name}_{name}.log"
        with ExitStack() as stack:
            side["ready_s"] = stack.enter_context(
                launch.running(words, url, start_timeout=args.start_timeout, log=log)
            )
            print(f"{name}: ready in {side['ready_s']:.1f} s", flush=True)
            model = model_of(url)
            side["version"] = _version(url)
            clients = stack.enter_context(Clients(url, model, args.processes))
            clocks = stack.enter_context(report.Clocks())
            loads = side["loads"]
            self._part(side, {}, "warm-up", lambda: self._saturate(clients, WARM_UP_S, seed=1))
            self._part(
                side, loads, "saturated", lambda: self._saturate(clients, args.saturate_seconds, seed=2)
            )
            for share in SHARES:
                self._part(side, loads, f"{share:.0%}", lambda share=share: self._load(clients, share))  # type: ignore[misc]
            scene = Intrusion(prompt=args.long_prompt, chunk=args.chunk, max_id=args.max_id)
            self._part(side, side, "long_prompt", lambda: serving.long_prompt(url, model, scene))
        side["clocks"] = clocks.seen

    def _saturate(self, clients: Clients, seconds: float, *, seed: int) -> dict[str, Any]:
        """Keep CONCURRENCY requests running for `seconds`; the rate they reach is the server's capacity."""
        return saturated(
            clients,
            CONCURRENCY,
            seconds=seconds,
            lengths=self._lengths,
            slo=SLO(),
            max_requests=round(CONCURRENCY + MAX_RATE * seconds),
            seed=seed,
        )

    def _load(self, clients: Clients, share: float) -> dict[str, Any]:
        """Send requests at `share` of the capacity.

        The capacity is `--saturation`, else the first side's, so that both servers get the same load.
        """
        args, first = self._args, next(iter(self.sides.values()))
        return at_rate(
            clients,
            share * (args.saturation or first["loads"]["saturated"]["rate"]),
            seconds=args.load_seconds,
            lengths=self._lengths,
            burstiness=args.burstiness,
            slo=SLO(),
            seed=3,
        )

    def _part(self, side: Side, into: dict[str, Any], name: str, run: Callable[[], Any]) -> None:
        """Run one part of the comparison, keep its result as `into[name]`, and save all results so far.

        An exception is kept in `side`, so that one failed part does not cost the others.
        """
        began = time.monotonic()
        try:
            into[name] = run()
        except Exception:  # the next part may succeed
            side["exceptions"][name] = traceback.format_exc()
            traceback.print_exc()
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
        self.save()

    def save(self) -> Path:
        """Write the results so far to bench/results."""
        arguments = {name: str(value) for name, value in vars(self._args).items()}
        return report.save(self._args.name, {"arguments": arguments, "sides": self.sides})


def _version(url: str) -> str | None:
    """Return the version that the server reports, as vLLM and Segue do; None if it reports none."""
    reply = httpx.get(f"{url}/version", timeout=10)
    return str(reply.json()["version"]) if reply.is_success else None


def measure(comparison: Comparison, commands: dict[str, str | None]) -> None:
    """Measure one server after the other."""
    for name, command in commands.items():
        if command:
            try:
                comparison.measure(name, command)
            except Exception:  # the other server may start
                comparison.sides[name]["exceptions"]["server"] = traceback.format_exc()
                traceback.print_exc()


def bars(ours: Side, theirs: Side) -> list[tuple[str, float, float]]:
    """Return (label, value, its maximum) of each bar.

    The values are ratios of ours to theirs, our longest gap in seconds, and our requests without an answer.
    Latencies count only answered requests, so the last must be 0.
    """
    found = []
    for name, load in ours["loads"].items():
        if name in _OPEN:
            found.append((f"failed or unfinished, at {name}", load["failed"] + load["unfinished"], 0))
    for share in _OPEN:
        if share in ours["loads"] and share in theirs["loads"]:
            for label, kind, which, bar in (
                ("first token, p50", "ttft_s", "p50", TTFT_BAR),
                ("gap, p99", "gap_s", "p99", GAP_BAR),
            ):
                ratio = ours["loads"][share][kind][which] / theirs["loads"][share][kind][which]
                found.append((f"{label}, at {share}: ours over theirs", ratio, bar))
    if scene := ours.get("long_prompt"):
        found.append(("longest gap at a long prompt, s", max(scene["worst_gap_s"]), scene["allowed_gap_s"]))
    return found


def show(sides: dict[str, Side]) -> None:
    """Print the loads and the long prompts."""
    rows = [
        row(f"{name} {part}", load) for name, side in sides.items() for part, load in side["loads"].items()
    ]
    report.show(TITLE, COLUMNS, rows)
    for name, side in sides.items():
        if scene := side.get("long_prompt"):
            worst = ", ".join(f"{1e3 * gap:.1f}" for gap in scene["worst_gap_s"])
            allowed = f"one chunk + 2 steps {1e3 * scene['allowed_gap_s']:.1f} ms"
            print(f"{name}: a long prompt among decodes: longest gaps {worst} ms, {allowed}")


def main() -> int:
    """Run the comparison; the exit code is 1 if a bar is missed or a part failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--theirs", help="a command with {model} and {port}")
    parser.add_argument("--ours", default=OURS, help="Segue's command, in the same form; measured second")
    parser.add_argument(
        "--saturation", type=serving.positive, help="requests per second, instead of the measured rate"
    )
    parser.add_argument(
        "--burstiness", type=serving.positive, default=1.0, help="1: Poisson; less: in bursts"
    )
    parser.add_argument(
        "--long-prompt", type=int, default=Intrusion().prompt, help="tokens of the long prompt"
    )
    parser.add_argument("--chunk", type=int, default=Intrusion().chunk, help="prompt tokens per step")
    parser.add_argument("--max-id", type=int, default=Lengths().max_id, help="largest token id of a prompt")
    parser.add_argument("--saturate-seconds", type=serving.positive, default=12.0)
    parser.add_argument("--load-seconds", type=serving.positive, default=15.0)
    parser.add_argument("--start-timeout", type=float, default=240.0, help="seconds")
    parser.add_argument("--processes", type=int, default=4, help="client processes")
    parser.add_argument("--name", default="gpu_http", help="name of the files in bench/results")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server is stopped
    with with_tokenizer(args.model) as model:
        comparison = Comparison(args, model)
        measure(comparison, {"theirs": args.theirs, "ours": args.ours})
    print(f"written to {comparison.save()}")
    serving.draw(
        args.name,
        {
            name: [load for part, load in side["loads"].items() if part in _OPEN]
            for name, side in comparison.sides.items()
        },
    )
    show(comparison.sides)
    if len(comparison.sides) < 2:
        return 1 if any(side["exceptions"] for side in comparison.sides.values()) else 0
    found = bars(comparison.sides["ours"], comparison.sides["theirs"])
    verdicts = [
        [label, f"{value:.3f}", f"{bar:.3f}", "holds" if value <= bar else "MISSED"]
        for label, value, bar in found
    ]
    report.show("bars", ["", "value", "maximum", ""], verdicts)
    return 0 if len(found) == 3 * len(SHARES) + 1 and all(value <= bar for _, value, bar in found) else 1


if __name__ == "__main__":
    sys.exit(main())
