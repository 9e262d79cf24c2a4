"""Measures short prompts with each mode of prefill graphs: requests per second and time to first token.

    python -m bench.prefill_graphs MODEL [--load-format dummy …]

Prompts have chat-like lengths: log-normal, median 17 tokens, sigma 1.6; lengths above 256 are left out. Each
request asks for one token, so that every step is a prefill, as on a worker that only prefills. Each client
sends its next prompt when it has its token. Scheduler and runner are those of an engine without frontend.

`grid` is --enable-batch-prefill-cuda-graph: one slot per prompt if at most half is padding, else a graph by
total tokens. `grid alone`: the smallest slots that hold the prompts, however much padding, else no graph.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import report
from segue.checkpoint.source import resolve_model
from segue.config import EngineConfig
from segue.distributed.info import TPInfo
from segue.messages.requests import AddRequest, SamplingParams, pack_ids
from segue.model_runner import graphs
from segue.model_runner.cuda_executor import CUDAExecutor
from segue.model_runner.executor import ForwardOutput
from segue.model_runner.runner import ModelRunner
from segue.scheduler.scheduler import Scheduler

MEDIAN, SIGMA, MAX_LEN = 17, 1.6, 256  # tokens; of the logarithm; tokens
CONCURRENCY = (1, 4, 16, 64)
MODES: dict[str, dict[str, Any]] = {
    "eager": {"disable_cuda_graph": True},
    "ragged": {},
    "grid": {"enable_batch_prefill_cuda_graph": True},
    "grid alone": {"enable_batch_prefill_cuda_graph": True},
}


def prompt_lengths(seed: int) -> Iterator[int]:
    """Yield prompt lengths without end."""
    rng = random.Random(seed)
    while True:
        length = round(rng.lognormvariate(0, SIGMA) * MEDIAN)
        if 1 <= length <= MAX_LEN:
            yield length


class Server:
    """A scheduler and a runner in this process, in one mode."""

    def __init__(self, config: EngineConfig, mode: str) -> None:
        """Load the model and capture the graphs of `mode`.

        "grid alone" takes the other captured sizes away and allows any padding, so that each prompt uses the
        grid of prefill graphs.
        """
        source = resolve_model(config)
        self.max_padding = graphs.MAX_PADDING
        with TemporaryDirectory() as run_dir:
            self.runner = ModelRunner(config, source, TPInfo(), Path(run_dir), lambda *_: None)
        if mode == "grid alone":
            self.max_padding = 1 << 20
            executor = self.runner._executor
            assert isinstance(executor, CUDAExecutor)
            executor.capture_sizes = replace(executor.capture_sizes, forward=(), prefill=())
        self.scheduler = Scheduler(self.runner.limits, config)
        self._count = 0

    def serve(self, clients: int, num_requests: int, seed: int) -> tuple[float, list[float]]:
        """Serve `num_requests`; return the seconds of all together, and of each one to its token."""
        graphs.MAX_PADDING = self.max_padding
        lengths, rng = prompt_lengths(seed), random.Random(seed)
        sent: dict[str, float] = {}
        seconds: list[float] = []

        def send() -> None:
            """Add one more request, with random token ids, to the scheduler."""
            self._count += 1
            rid, ids = str(self._count), [rng.randrange(10_000) for _ in range(next(lengths))]
            sent[rid] = time.perf_counter()
            params = SamplingParams(max_new_tokens=1)
            message = AddRequest(rid=rid, prompt=pack_ids(ids), params=params)
            assert self.scheduler.add(message, sent[rid]) is None

        def read(pending: ForwardOutput) -> None:
            """Take a step's result; each request that it ends is replaced by a new one."""
            result, now = pending.result(), time.perf_counter()
            done = self.scheduler.apply(result, now).finished
            for end in done:
                seconds.append(now - sent.pop(end.rid))
                if len(seconds) + len(sent) < num_requests:
                    send()

        begun, pending = time.perf_counter(), None
        for _ in range(clients):
            send()
        while sent:
            plan = self.scheduler.plan(time.perf_counter())
            launched = self.runner.forward_batch(plan) if plan is not None else None
            if pending is not None:
                read(pending)
            pending = launched
        return time.perf_counter() - begun, seconds


def main() -> None:
    """Run all modes in turns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--repetitions", type=int, default=4)
    parser.add_argument(
        "--requests", type=int, default=300, help="requests with one client; with 64, four times as many"
    )
    args = parser.parse_args()
    servers = {}
    for mode, options in MODES.items():
        config = EngineConfig(
            model=args.model,
            load_format=args.load_format,
            dtype="bfloat16",
            max_model_len=1024,
            num_kv_tokens=1 << 15,
            max_running_requests=128,
            disable_prefix_cache=True,
            **options,
        )
        servers[mode] = Server(config, mode)
    figures: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for clients in CONCURRENCY:
        count = args.requests * (4 if clients == CONCURRENCY[-1] else 2 if clients > 1 else 1)
        runs: dict[str, list[tuple[float, list[float]]]] = {mode: [] for mode in MODES}
        before = {}
        for repetition in range(-1, args.repetitions):  # the first warms up
            order = list(MODES) if repetition % 2 else list(MODES)[::-1]
            for mode in order:
                server = servers[mode]
                run = server.serve(clients, count, seed=repetition)
                if repetition >= 0:
                    runs[mode].append(run)
                else:
                    now = server.scheduler.totals
                    before[mode] = (
                        now.num_steps,
                        sum(now.graph_hits.values()),
                        now.padded_tokens,
                        now.prompt_tokens,
                    )
        for mode, server in servers.items():
            now = server.scheduler.totals
            after = (now.num_steps, sum(now.graph_hits.values()), now.padded_tokens, now.prompt_tokens)
            steps, hits, padded, tokens = (b - a for a, b in zip(before[mode], after, strict=True))
            waits = sorted(second for _, seconds in runs[mode] for second in seconds)
            figures[mode].append(
                {
                    "clients": clients,
                    "requests_per_s": round(statistics.median(count / total for total, _ in runs[mode]), 1),
                    "ttft_ms_p50": round(1e3 * waits[len(waits) // 2], 3),
                    "ttft_ms_p99": round(1e3 * waits[len(waits) * 99 // 100], 3),
                    "steps": steps,
                    "graph_hits": hits,
                    "computed_per_prompt_token": round(1 + padded / tokens, 3),
                }
            )
    for mode, server in servers.items():
        server.runner.close()
        rows = [[f"{value:g}" for value in figure.values()] for figure in figures[mode]]
        report.show(mode, list(figures[mode][0]), rows)
    record = {
        "model": Path(args.model).name,
        "lengths": {"median": MEDIAN, "sigma": SIGMA, "longest": MAX_LEN},
        **figures,
    }
    print(f"written to {report.save('gpu_prefill_graphs', record)}")


if __name__ == "__main__":
    sys.exit(main())
