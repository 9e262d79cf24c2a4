"""Measures tensor parallelism on the GPUs of one host: Qwen3-8B's decode step, and the all-reduces alone.

    python -m bench.tensor_parallel

Weights are random. A step's time is that of the whole engine, (257 tokens - 1 token) / 256, for a batch of
prompts of 512 tokens. The all-reduces, each with the following addition and norm, are timed as chains in a
CUDA graph.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from bench import report, suite
from segue import Engine
from segue.distributed.groups import TPGroups, connect
from segue.distributed.info import TPInfo

BATCHES = (1, 32, 256)
ROWS = (1, 4, 8, 16, 32, 48, 64, 96, 128, 256, 512, 1024)
HIDDEN = 4096
SPLITS = 2  # split-K partials of the GEMMs of few rows at these sizes
LINKS = 72  # all-reduces in a chain


def decode_steps(directory: str, tp: int) -> dict[str, float]:
    """Return the milliseconds per step by batch size."""
    rng = random.Random(0)
    found = {}
    begun = time.perf_counter()
    with Engine(
        directory,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=4096,
        max_running_requests=256,
        disable_prefix_cache=True,
        tp=tp,
    ) as engine:
        found["ready_s"] = time.perf_counter() - begun

        def timed(rows: int, tokens: int) -> float:
            """Return the seconds for `tokens` tokens of each of `rows` random prompts of 512 tokens."""
            prompts = [[rng.randint(0, 10000) for _ in range(512)] for _ in range(rows)]
            params = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
            started = time.perf_counter()
            engine.generate(input_ids=prompts, sampling_params=params)
            return time.perf_counter() - started

        for rows in BATCHES:
            timed(rows, 2)
            differences = [timed(rows, 257) - timed(rows, 1) for _ in range(3)]
            found[f"step_ms_{rows}"] = statistics.median(differences) / 256 * 1e3
            print(f"tp {tp}, {rows} rows: {found[f'step_ms_{rows}']:.3f} ms per step", flush=True)
    return found


def sums(rank: int, size: int, directory: str) -> None:
    """Time the all-reduces on one rank; rank 0 writes the times to `directory`."""
    from segue.kernels.triton import all_reduce

    tp, device = TPInfo(rank, size), torch.device("cuda", rank)
    torch.cuda.set_device(device)
    path = Path(directory)
    groups = connect(tp, rendezvous=path / "rendezvous", device=device, timeout=timedelta(seconds=60))
    all_reduce.MAX_BYTES = 8 * HIDDEN * 256 * (size - 1)
    fused_all_reduce = all_reduce.OneShotAllReduce(groups, device, HIDDEN, 1)
    with torch.cuda.stream(torch.cuda.Stream()):
        found = []
        for rows in ROWS:
            found.append(_time_sums(rows, groups, fused_all_reduce))
            if rank == 0:
                print(f"tp {size}: {found[-1]}", flush=True)
    groups.barrier()
    if rank == 0:
        (path / "sums.json").write_text(json.dumps(found))


def _time_sums(rows: int, groups: TPGroups, fused_all_reduce: Any) -> dict[str, float]:
    """Return the microseconds of each way to all-reduce `rows` tokens."""
    from segue.kernels.ops import add_rms_norm

    residual, whole, weight = (torch.randn(n, HIDDEN, device="cuda").bfloat16() for n in (rows, rows, 1))
    split = torch.randn(SPLITS, rows, HIDDEN, device="cuda")
    norm = (residual, weight[0], 1e-6)
    links: dict[str, Callable[[], object]] = {
        "one rank's norm": lambda: add_rms_norm(whole, *norm),
        "nccl + norm": lambda: add_rms_norm(groups.collectives.all_reduce(whole), *norm),
    }
    if rows <= fused_all_reduce.max_rows:
        links["one-shot"] = lambda: fused_all_reduce.add_rms_norm(whole, *norm)
        links["one-shot of 2 splits"] = lambda: fused_all_reduce.add_rms_norm(split, *norm)
    return {"rows": rows} | {name: _chain(link, groups.barrier) for name, link in links.items()}


def _chain(link: Callable[[], object], barrier: Callable[[], None]) -> float:
    """Return the microseconds per link of a chain in a graph, the median of seven replays."""
    link()
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    for _ in range(LINKS):
        link()
    graph.capture_end()
    times = []
    for _ in range(7):
        barrier()
        graph.replay()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / LINKS * 1e3)
    return round(statistics.median(times), 2)


def main() -> None:
    """Measure each tensor-parallel size that this host has GPUs for."""
    sizes = [size for size in (1, 2, 4) if size <= torch.cuda.device_count()]
    results: dict[str, Any] = {"sums_us": {}, "engine": {}}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(suite.COMMON | suite.SHAPES["8b"]))
        for size in sizes:
            if size > 1:
                subdirectory = Path(directory) / str(size)
                subdirectory.mkdir()
                mp.spawn(sums, (size, str(subdirectory)), nprocs=size)
                results["sums_us"][size] = json.loads((subdirectory / "sums.json").read_text())
            results["engine"][size] = decode_steps(directory, size)
            report.save("gpu_tensor_parallel", results)
    alone = results["engine"][1]
    for size in sizes[1:]:
        shares = [f"{results['engine'][size][f'step_ms_{n}'] / alone[f'step_ms_{n}']:.3f}" for n in BATCHES]
        print(f"tp {size} / tp 1 at {BATCHES} rows: {', '.join(shares)}")


if __name__ == "__main__":
    main()
