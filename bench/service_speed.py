"""Compares generation with weights in the memory service to generation without it, on a GPU.

    python -m bench.service_speed [0.6b] [--rounds 1] [--option=value …]

Engines run the suite's batch offline256 three times each, in processes of their own, in the order without,
with, with, without. The best two of each engine's batches count. With the service, generation may be at most
1 % slower.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

from bench import launch, report, suite

ORDER = ("without", "with", "with", "without")
LOSS_BAR = 0.01


def measured(size: str, options: list[str]) -> float:
    """Return the tokens per second of an engine: the mean of its best two batches."""
    words = [sys.executable, "-m", "bench.first_minute", size, "--one", *options]
    output = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return statistics.mean(sorted(found["offline256, tokens/s"])[-2:])


def main() -> int:
    """Run the benchmark; the exit code is 1 if the bar is missed."""
    parser = argparse.ArgumentParser(
        usage="python -m bench.service_speed [SIZE] [--rounds N] [--option=value …]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("size", nargs="?", default="0.6b", choices=suite.SHAPES, help="of the model")
    parser.add_argument("--rounds", type=int, default=1)
    args, options = parser.parse_known_args()
    rates: dict[str, list[float]] = {name: [] for name in ORDER}
    with launch.memory_service("all") as directory:
        for _ in range(args.rounds):
            for name in ORDER:
                own = [f"--gms-dir={directory}"] if name == "with" else []
                rates[name].append(measured(args.size, [*options, *own]))
                print(f"{name} the service: {rates[name][-1]:.0f} tokens/s", flush=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    loss = 1 - medians["with"] / medians["without"]
    report.show(
        f"Qwen3-{args.size}, offline256, tokens/s",
        [*medians, "loss", "bar"],
        [[*(f"{value:.0f}" for value in medians.values()), f"{loss:.2%}", f"{LOSS_BAR:.0%}"]],
    )
    name = f"gpu_service_speed_{args.size}"
    print(f"written to {report.save(name, {'options': options, 'rates': rates, 'loss': loss})}")
    return 1 if loss > LOSS_BAR else 0


if __name__ == "__main__":
    sys.exit(main())
