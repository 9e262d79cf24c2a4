"""Measures the first minute of an engine on a GPU: its start, without compiled kernels and with, and work.

    python -m bench.first_minute [0.6b] [--option=value …]

The first start has an empty cache of kernels, the second finds it filled. Each engine is a process of its own
and runs the suite's batch offline256 three times, without any request before: the first one should be as fast
as the third, and no kernel should be compiled behind the start. Weights are dummies, and the context is 4096.

The timelines say when each part of a start began, in seconds since the process of the engine began.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from typing import Any

from bench import suite
from bench.starting import WORKLOAD, age, engine_options

BARS = {"cold": 25.0, "warm": 8.0}  # seconds until ready
SPEED_BAR = 0.97  # the speed of the first batch, of that of the third
REPETITIONS = 3
STARTS = tuple(BARS)


def first_minute(size: str, options: dict[str, Any]) -> dict[str, Any]:
    """Start an engine in this process, run the batches, and return the figures."""
    from segue import Engine

    timeline = StartTimeline()
    with Engine(suite.model_dir(size), **{**WORKLOAD, **options}) as engine:
        timeline.end(engine)
        return figures(engine, timeline)


class StartTimeline:
    """Notes when this process gets the first message of a worker, and when each step of the start begins."""

    def __init__(self) -> None:
        """Begin; `segue.Engine` has just been imported."""
        from segue.launch.runtime import Runtime
        from segue.messages.control import StartStep

        self.began = {"imported": age()}
        receive = Runtime._receive

        def note(runtime: Any, message: Any) -> None:
            self.began.setdefault("worker imported", age())
            if isinstance(message, StartStep) and message.rank == 0:
                self.began.setdefault(message.step, age())
            receive(runtime, message)

        Runtime._receive = note  # type: ignore[method-assign, assignment]

    def end(self, engine: Any) -> None:
        """Note that the engine is ready, and when its worker began."""
        now = age()
        began = now - age(engine._runtime.worker_pids[0])
        self.began["worker began"] = max(began, self.began["imported"])  # the system counts in ticks of 10 ms
        self.began["ready"] = now

    def sorted(self) -> dict[str, float]:
        """Return the parts in order."""
        return {name: round(at, 2) for name, at in sorted(self.began.items(), key=lambda item: item[1])}


def figures(engine: Any, timeline: StartTimeline) -> dict[str, Any]:
    """Run the batches on an engine that has just started, and return the figures of both."""
    from segue.bench.offline import Batch, generate

    prompts, max_tokens = suite.offline256(random.Random(0))
    batch = Batch(prompts=prompts, max_tokens=max_tokens, temperature=0.6)
    rates = []
    for _ in range(REPETITIONS):
        began = time.perf_counter()
        generate(engine, batch)
        rates.append(round(sum(max_tokens) / (time.perf_counter() - began)))
    info = engine.get_server_info()
    state, steps = info["internal_states"][0], info["decided"]["init_steps"]
    [kernels] = [step["detail"] for step in steps if step["name"] == "kernels"]
    return {
        "ready, s": round(timeline.began["ready"], 1),
        "offline256, tokens/s": rates,
        "first of third": round(rates[0] / rates[-1], 3),
        "compiled behind ready": state["kernel_compilations_after_ready"],
        "loaded behind ready": state["kernel_loads_after_ready"],
        "kernels": kernels,
        "steps, s": {step["name"]: round(step["seconds"], 2) for step in steps},
        "timeline, s": timeline.sorted(),
    }


def missed(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return the bars that the starts have missed."""
    wrong = []
    for name, figures in found.items():
        if figures["ready, s"] > BARS[name]:
            wrong.append(f"{name}: ready after {figures['ready, s']} s, and the bar is {BARS[name]:g}")
        if figures["first of third"] < SPEED_BAR:
            wrong.append(f"{name}: the first batch has {figures['first of third']:.1%} of the third's speed")
        if count := figures["compiled behind ready"]:
            wrong.append(f"{name}: {count} kernels were compiled behind ready")
    return wrong


def main() -> int:
    """Run the benchmark; the exit code is 1 if a bar is missed."""
    parser = argparse.ArgumentParser(
        usage="python -m bench.first_minute [SIZE] [--option=value …]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("size", nargs="?", default="0.6b", choices=suite.SHAPES, help="of the model")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # one start, as JSON
    args, rest = parser.parse_known_args()
    if args.one:
        print(json.dumps(first_minute(args.size, engine_options(rest))))
        return 0
    from bench import report

    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in STARTS:
            words = [sys.executable, "-m", "bench.first_minute", args.size, "--one", *rest]
            env = os.environ | {"TRITON_CACHE_DIR": cache}
            output = subprocess.run(words, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
            found[name] = json.loads(output.splitlines()[-1])
            print(f"{name}: {found[name]}", flush=True)
    rows = [
        [
            name,
            f"{each['ready, s']:.1f}",
            f"{BARS[name]:g}",
            *(str(rate) for rate in each["offline256, tokens/s"]),
            f"{each['first of third']:.1%}",
            str(each["compiled behind ready"]),
        ]
        for name, each in found.items()
    ]
    header = [
        "start",
        "ready, s",
        "bar",
        "first",
        "second",
        "third, tokens/s",
        "first of third",
        "compiled later",
    ]
    report.show(f"Qwen3-{args.size}: the first minute", header, rows)
    for name, each in found.items():
        print(f"{name}: {', '.join(f'{part} {at:.2f}' for part, at in each['timeline, s'].items())}")
    faults = missed(found)
    for fault in faults:
        print(fault)
    name = f"gpu_first_minute_{args.size}"
    print(f"written to {report.save(name, {'options': rest, 'missed': faults, 'starts': found})}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
