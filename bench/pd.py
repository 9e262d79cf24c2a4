"""Measures what it costs to hand KV over from a prefill engine to a decode engine.

    python -m bench.pd                                             # CPUs, the bundled model
    python -m bench.pd "$(python -c 'from bench.suite import model_dir; print(model_dir("8b"))')" --gpus 2

On GPUs the model has dummy weights, and the engines have a GPU each (with ``--gpus 1`` they share one).

`pause`: the time from the reply of the prefill engine, which has token 1, to the event of the decode engine
that has token 2, less one step. `pushes`: pages of the model's size, from the call of the transport until it
reports the end, by bytes. `streams`: the time between tokens of streams on the decode engine, alone and while
long prompts are handed over one after the other. JSON of GPUs goes to bench/results/gpu_pd.json; figures of
CPUs are only printed. At the end one request is shown from its arrival to its last token, in the terminal and
as bench/results/pd_timeline.svg, or gpu_pd_timeline.svg.

`--against-two` measures something else, with a router: see `bench.pd_against_two`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import torch

from bench import pd_against_two, pd_timeline, plot, report
from bench.model_dir import with_tokenizer
from bench.pd_pair import EnginePair, HandedOver, draw, hand_over, started
from bench.pd_pushes import MIB, pushes, shape_of_model
from segue.bench.client import Client, Job, StreamingRequest
from segue.bench.serving import model_of
from segue.checkpoint.source import resolve
from segue.config import EngineConfig
from segue.doctor.machine import num_cores

STREAM_TOKENS = 3000  # of each stream on the decode engine, which is given up before it ends
PHASE_S = 3.0  # of streams alone, and of streams beside handovers
PHASES = ("alone", "handing over", "handing over", "alone")
BEHIND = "with one row more"
PICTURED = {True: 12_000, False: 1_200}  # tokens of the prompt whose way is drawn, on GPUs and on CPUs
BARS = {"pause p50, ms": 5.0, "pause p99, ms": 15.0, "push of 64 MiB, GB/s": 200.0, "streams, %": 5.0}


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return p50, p99 and the number of values in milliseconds."""
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {
        "p50_ms": round(1e3 * statistics.median(ordered), 3),
        "p99_ms": round(1e3 * p99, 3),
        "count": len(ordered),
    }


async def pauses(pair: EnginePair, lengths: Sequence[int], repeats: int) -> dict[str, Any]:
    """Hand requests over one after the other, with nothing else on the engines."""
    rng, found = random.Random(1), {}
    async with httpx.AsyncClient(timeout=120) as client:
        for length in lengths:
            runs = [await hand_over(client, pair, draw(rng, length)) for _ in range(repeats + 2)][2:]
            longest = max(runs, key=lambda run: run.gap - run.step)
            found[str(length)] = {
                "pause": percentiles([run.gap - run.step for run in runs]),
                "longest": told(
                    pd_timeline.times_of(*pair.recent(longest.room), longest.begin, longest.tokens)
                ),
                "step_ms": round(1e3 * statistics.median(run.step for run in runs), 3),
                "first_token_ms": round(1e3 * statistics.median(run.first for run in runs), 3),
            }
    return found


def told(times: pd_timeline.RequestTimes) -> dict[str, Any]:
    """Return when the last of each kind of event came, and the first tokens of the decode engine, in ms."""

    def last(events: pd_timeline.Events) -> dict[str, float]:
        return {name: round(found[-1][0], 3) for name, found in events.items()}

    tokens = [round(when, 3) for when in times.tokens[:4]]
    return {"prefill": last(times.prefill), "decode": last(times.decode), "tokens": tokens}


async def streams(pair: EnginePair, count: int, length: int) -> dict[str, Any]:
    """Time the tokens of streams on the decode engine, alone and beside handovers, in turns.

    A handover lasts until the request's second token. Its other tokens are computed in steps with one row
    more, as if it had come in any other way; they are shown apart. Steps take longer as the streams grow, in
    the last phase by a third. So each phase has its own percentiles, of which the mean of two is taken: both
    turns are on average at the same time.
    """
    rng = random.Random(2)
    client = Client(pair.decode, model_of(pair.decode))
    jobs = [Job(prompt=draw(rng, 32), max_tokens=STREAM_TOKENS) for _ in range(count)]
    connections = [client.connection(job, 0.0) for job in jobs]
    for connection in connections:
        await client.send(connection)
    while any(len(connection.pieces) < 8 for connection in connections):
        ended = [each for each in connections if each.ended.is_set()]
        assert not ended, f"a stream ended at once: {ended[0].pieces}"
        await asyncio.sleep(0.01)
    spans: list[tuple[str, float, float]] = []  # phase and its number, begin, end
    runs: list[HandedOver] = []
    async with httpx.AsyncClient(timeout=120) as http:
        await hand_over(http, pair, draw(rng, length))
        for turn, phase in enumerate(PHASES):
            begin = time.perf_counter()
            while time.perf_counter() < begin + PHASE_S:
                if phase == "alone":
                    await asyncio.sleep(0.05)
                else:
                    runs.append(run := await hand_over(http, pair, draw(rng, length)))
                    spans.append((f"{phase} {turn}", run.begin, run.tokens[1]))
                    spans.append((f"{BEHIND} {turn}", run.tokens[1], run.tokens[-1]))
            if phase == "alone":
                spans.append((f"{phase} {turn}", begin, time.perf_counter()))
    for connection in connections:
        connection.give_up()
    steps = {
        name: percentiles(intervals(connections, spans, name)) for name in sorted({each[0] for each in spans})
    }
    return {
        "streams": count,
        "prompt_tokens": length,
        "handed_over": len(runs),
        "pause": percentiles([run.gap - run.step for run in runs]),
        "step": {phase: mean_of(steps, phase) for phase in (*dict.fromkeys(PHASES), BEHIND)},
        "step by turn": steps,
    }


def mean_of(steps: Mapping[str, Mapping[str, float]], phase: str) -> dict[str, float]:
    """Return the mean of each percentile over the turns of a phase."""
    turns = [found for name, found in steps.items() if name.startswith(phase)]
    return {key: round(statistics.mean(found[key] for found in turns), 3) for key in ("p50_ms", "p99_ms")}


def intervals(
    connections: Sequence[StreamingRequest], spans: Sequence[tuple[str, float, float]], phase: str
) -> list[float]:
    """Return the seconds between events of the streams within the spans of a phase."""
    found = []
    for connection in connections:
        times = connection.timeline().times
        for before, after in pairwise(times):
            if any(name == phase and begin <= before and after <= end for name, begin, end in spans):
                found.append(after - before)
    return found


def picture(pair: EnginePair, length: int, path: Path, title: str) -> str:
    """Hand one request over, draw where its time goes, and return the same as text."""

    async def one() -> HandedOver:
        async with httpx.AsyncClient(timeout=120) as client:
            return await hand_over(client, pair, draw(random.Random(3), length))

    run = asyncio.run(one())
    times = pd_timeline.times_of(*pair.recent(run.room), run.begin, run.tokens)
    lanes = pd_timeline.lanes(times)
    plot.timeline(path, f"{title}: one prompt of {length:,} tokens", lanes, "ms")
    return pd_timeline.text(lanes)


def judged(found: dict[str, Any]) -> dict[str, float]:
    """Return the figures that have bars."""
    pause = max(found["pauses"].values(), key=lambda each: each["pause"]["p50_ms"])["pause"]
    step = found["streams"]["step"]
    grown = step["handing over"]["p50_ms"] / step["alone"]["p50_ms"] - 1
    return {
        "pause p50, ms": pause["p50_ms"],
        "pause p99, ms": max(each["pause"]["p99_ms"] for each in found["pauses"].values()),
        "push of 64 MiB, GB/s": found["pushes"][str(64 * MIB)]["GB/s"],
        "streams, %": round(100 * grown, 2),
    }


def kept(name: str, value: float) -> bool:
    return value >= BARS[name] if name.endswith("GB/s") else value <= BARS[name]


def engine_options(given: argparse.Namespace, stack: ExitStack) -> list[str]:
    """Return the options that all engines have; files that they need are there until the stack is closed."""
    if given.gpus:
        options = ["--device=cuda", "--load-format=dummy", "--max-model-len=16640", "--num-kv-tokens=160000"]
    else:
        options = ["--device=cpu", "--num-kv-tokens=8192", "--max-running-requests=8"]
    if given.model and Path(given.model).is_dir():
        options.append(f"--model={stack.enter_context(with_tokenizer(Path(given.model)))}")
    elif given.model:
        options.append(f"--model={given.model}")
    return [*options, *given.option]


def against_two(given: argparse.Namespace) -> int:
    """Compare the pair with two engines.

    The exit code is 1 if KV was recomputed, or if the bar is missed on two GPUs.
    """
    if given.gpus:
        given.concurrency = given.concurrency or 256
        given.loads, given.seconds = pd_against_two.LOADS, given.seconds or 60.0
        given.saturate_seconds = 15.0
    else:
        given.concurrency, given.loads = given.concurrency or 2, pd_against_two.SMALL_LOADS
        given.seconds, given.saturate_seconds = given.seconds or 10.0, 15.0
    given.repeats = given.repeats or 3
    with ExitStack() as stack:
        options = engine_options(given, stack)
        logs = Path(stack.enter_context(TemporaryDirectory()))
        found = pd_against_two.measure(given, options, logs)
    pd_against_two.show(found)
    ratios = pd_against_two.judged(found)
    if not pd_against_two.is_sound(found):
        print("KV was not adopted: the pair computed prompts twice", file=sys.stderr)
        return 1
    return int(given.gpus == 2 and not all(ratio <= pd_against_two.BAR for ratio in ratios.values()))


def main() -> int:
    """Measure, show and store; the exit code is 1 if a bar is missed on two GPUs, or if KV was recomputed."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0] if __doc__ else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", help="default: the bundled model")
    parser.add_argument("--gpus", type=int, choices=(0, 1, 2), default=0, help="0: CPUs")
    parser.add_argument("--lengths", type=int, nargs="+", help="prompt tokens of the pauses")
    parser.add_argument("--repeats", type=int, help="of each length, or of each load")
    parser.add_argument("--streams", type=int, help="that decode beside handovers")
    parser.add_argument(
        "--option", action="append", default=[], help="for every engine, like --option=--num-kv-tokens=200000"
    )
    parser.add_argument("--against-two", action="store_true", help="compare the pair with two engines")
    against = parser.add_argument_group("with --against-two")
    against.add_argument("--only", choices=sorted(pd_against_two.LOADS), help="one load; default: all")
    against.add_argument("--seconds", type=float, help="of arrivals")
    against.add_argument("--load", type=float, default=0.8, help="share of the smaller saturation")
    against.add_argument("--concurrency", type=int, help="requests at any time, to saturate")
    against.add_argument("--processes", type=int, default=4, help="client processes")
    given = parser.parse_args()
    if given.against_two:
        return against_two(given)
    on_gpu = given.gpus > 0
    lengths = given.lengths or ([100, 1000, 4000, 8000] if on_gpu else [32, 200])
    repeats, count = given.repeats or (30 if on_gpu else 8), given.streams or (32 if on_gpu else 2)
    devices = ("cuda:0", f"cuda:{given.gpus - 1}") if on_gpu else ("cpu", "cpu")
    source = resolve(given.model, "dummy" if on_gpu else "auto", EngineConfig().cache_dir)
    shape = shape_of_model(source.config, 64 if on_gpu else 16)
    found: dict[str, Any] = {"model": source.name, "gpus": given.gpus}
    found["pushes"] = pushes(shape, *devices)
    if on_gpu:
        torch.cuda.empty_cache()
    with ExitStack() as stack:
        options = engine_options(given, stack)
        logs = Path(stack.enter_context(TemporaryDirectory()))
        pair = stack.enter_context(started(given.gpus, options, logs))
        gc.freeze()  # a collection of this process, which has torch, would count as a pause
        gc.disable()
        found["pauses"] = asyncio.run(pauses(pair, lengths, repeats))
        found["streams"] = asyncio.run(streams(pair, count, lengths[-1]))
        gc.unfreeze()
        gc.enable()
        counted = pair.handover()
        was_adopted = not counted["recomputed"] and not counted["failed"]
        if was_adopted:
            path = report.RESULTS / f"{'gpu_' if on_gpu else ''}pd_timeline.svg"
            where = f"{given.gpus} GPUs" if on_gpu else f"{num_cores()} CPU cores"
            drawn = picture(pair, PICTURED[on_gpu], path, f"{source.name} on {where}")
    found["handover"] = {name: counted[name] for name in ("num_adopted", "recomputed", "failed", "num_pages")}
    found["bars"] = figures = judged(found)
    if on_gpu:
        report.save("gpu_pd", found)
    report.show("figures", ["", "found", "bar"], [[k, f"{v:g}", f"{BARS[k]:g}"] for k, v in figures.items()])
    print(json.dumps(found, indent=1))
    if was_adopted:
        print(f"one request through both engines, drawn in {path}:\n{drawn}")
    else:
        print("KV was not adopted: these times are those of computing prompts again", file=sys.stderr)
        return 1
    return 1 if given.gpus == 2 and not all(kept(*each) for each in figures.items()) else 0


if __name__ == "__main__":
    sys.exit(main())
