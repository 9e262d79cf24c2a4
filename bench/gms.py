"""Measures engines that share their weights against engines that have their own, on this machine.

    python -m bench.gms [--name=cpu_gms] [--blocks=5] [--updates=9] [--option=value …]

The other options are those of ``segue serve``; without ``--model`` it is the bundled model.

- *Speed*: tokens per second of prefill and decode over HTTP. A and C have weights of their own, B those of a
  memory service. Each block measures A B C C B A, and the verdict is that of `bench.before_after`: B is worse
  if it loses more than 2 % and more than C differs from A.
- *Memory*: the shares (PSS) of the slabs of 1, 2 and 3 engines, in sum, and one copy of the weights. The bar
  is 1.02 copies.
- *Updates*: the milliseconds in which nothing is generated (``write_s``) when the weights are updated from
  disk, with the service and without it; with it, other engines follow.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from bench import cpu_vs_transformers, launch, report, workload
from bench.before_after import ORDER, Figures, compared
from segue.checkpoint.source import resolve
from tests.e2e.slabs import slabs_of

COPIES = 1.02  # that the slabs of all engines may take in sum
NUM_ENGINES = 3
UPDATE_S = 600.0


class BenchEngine:
    """A server, and a client of it."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self._process = process
        self._http = httpx.Client(base_url=url, timeout=UPDATE_S)

    def close(self) -> None:
        """Close the client."""
        self._http.close()

    @property
    def ranks(self) -> list[int]:
        """The process ids of the workers."""
        tasks = Path(f"/proc/{self._process.pid}/task").glob("*/children")
        return [int(child) for file in tasks for child in file.read_text().split()]

    def speeds(self) -> Figures:
        """Return the tokens per second of each measure of `bench.cpu_vs_transformers`."""
        return {
            f"{each.name}, tokens/s": cpu_vs_transformers.tokens_per_second(self._generate, each, seed=0)
            for each in cpu_vs_transformers.MEASURES
        }

    def update(self) -> float:
        """Update the weights from the files that they came from; returns the milliseconds of the hold."""
        info = self._http.get("/server_info").json()
        source = resolve(info["model"], info["load_format"], info["cache_dir"])
        body = {"model_path": str(source.gguf or source.directory)}
        answer = self._http.post("/update_weights_from_disk", json=body)
        answer.raise_for_status()
        return 1e3 * float(answer.json()["timings"]["write_s"])

    def _generate(self, batch: list[list[int]], num_tokens: int) -> None:
        body = {"input_ids": batch, "sampling_params": workload.greedy(num_tokens)}
        self._http.post("/generate", json=body).raise_for_status()


@contextmanager
def engine(*options: str) -> Iterator[BenchEngine]:
    """Yield a server that is ready."""
    url = f"http://127.0.0.1:{(port := launch.free_port())}"
    given = ["--port", str(port), "--log-level", "error", "--disable-prefix-cache", *options]
    with launch.started([sys.executable, "-m", "segue", "serve", *given], url) as process:
        found = BenchEngine(process, url)
        try:
            yield found
        finally:
            found.close()


def measure_speed(options: list[str], blocks: int) -> dict[str, Any]:
    """Compare the speeds of an engine with shared weights and of two with weights of their own."""
    with launch.memory_service("cpu") as directory, ExitStack() as stack:
        start = partial(lambda *more: stack.enter_context(engine(*options, *more)))
        sides = {"before": start(), "after": start("--gms-dir", directory), "before again": start()}
        for each in sides.values():
            each.speeds()  # warms up
        found: list[list[tuple[str, Figures]]] = []
        for number in range(blocks):
            found.append([(side, sides[side].speeds()) for side in ORDER])
            print(f"block {number + 1} of {blocks}", flush=True)
    return {name: compared(found, name) for name in found[0][0][1]}


def measure_memory(options: list[str]) -> dict[str, Any]:
    """Return one copy of the weights, and the sum of the shares of 1, 2, … engines, in bytes."""
    shares, copy = [], 0
    with launch.memory_service("cpu") as directory, ExitStack() as stack:
        engines: list[BenchEngine] = []
        for _ in range(NUM_ENGINES):
            engines.append(stack.enter_context(engine(*options, "--gms-dir", directory)))
            found = [slabs_of(each.ranks) for each in engines]
            copy = found[0][0]
            shares.append(sum(share for _, share, _ in found))
    return {"copy": copy, "shares": shares, "copies": [share / copy for share in shares]}


def measure_updates(options: list[str], count: int) -> dict[str, list[float]]:
    """Return the holds of updates in milliseconds: of own weights, of shared ones, and with a follower."""
    found: dict[str, list[float]] = {}
    with engine(*options) as own:
        found["own weights"] = [own.update() for _ in range(count)]
    with launch.memory_service("cpu") as directory, engine(*options, "--gms-dir", directory) as first:
        found["shared"] = [first.update() for _ in range(count)]
        with engine(*options, "--gms-dir", directory):
            found["shared, one follower"] = [first.update() for _ in range(count)]
    return found


def main() -> int:
    """Run the benchmark; the exit code is 1 if a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", default="cpu_gms", help="of the file with the results")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--updates", type=int, default=9)
    args, options = parser.parse_known_args()
    memory = measure_memory(options)
    updates = measure_updates(options, args.updates)
    speed = measure_speed(options, args.blocks)
    holds = {
        name: {"median_ms": statistics.median(values), "all_ms": values} for name, values in updates.items()
    }
    rows = [
        [name, f"{each['change']:+.1%}", f"spread {each['spread']:.1%}", "worse" if each["worse"] else ""]
        for name, each in speed.items()
    ]
    rows += [
        [f"slabs of {count} engines", f"{copies:.3f} copies", f"at most {COPIES}", ""]
        for count, copies in enumerate(memory["copies"], 1)
    ]
    rows += [[f"hold, {name}", f"{each['median_ms']:.1f} ms", "", ""] for name, each in holds.items()]
    report.show("shared weights against own ones", ["", "", "", ""], rows)
    print(f"written to {report.save(args.name, {'speed': speed, 'memory': memory, 'updates': holds})}")
    misses = any(each["worse"] for each in speed.values()) or max(memory["copies"]) > COPIES
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
