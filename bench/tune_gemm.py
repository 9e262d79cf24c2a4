"""Measures the best plan of each GEMM of a decode step, and stores it in the table that the kernels read.

    python -m bench.tune_gemm qwen3-0.6b qwen3-8b qwen3-8b:2 qwen3-8b:4

`:2` means one rank's shard of tensor parallel 2; only tiles that are best for a whole model are tried for it.
Every plan is timed as a chain of GEMMs with different weights in one CUDA graph, so that neither launches nor
cached weights flatter it, against cuBLAS in the same chain. For split-K partials, the time to read them is
added. Only the measured shapes are replaced in the table.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from bench.roofline import Machine
from segue.kernels.triton import gemm
from segue.kernels.triton.gemm import GemmPlan
from segue.models.sharding import shard_rows

# hidden, query heads, KV heads, head size, intermediate, vocabulary
MODELS = {
    "qwen3-0.6b": (1024, 16, 8, 128, 3072, 151936),
    "qwen3-8b": (4096, 32, 8, 128, 12288, 151936),
}
ROWS = (1, 4, 8, 16, 32, 64, 96, 128, 192, 256)
MEMORY = 3.5e12  # bytes per second at which split-K partials are read
SHARED = 227 << 10  # bytes of shared memory per program
WORTH = 0.98  # a plan is stored if it takes less than this share of cuBLAS's time


def shapes(model: str) -> Iterator[tuple[int, int, bool]]:
    """Yield (N, K, whether the reader takes split-K partials) of a model, or of one rank's shard of it."""
    name, _, ranks = model.partition(":")
    hidden, heads, kv_heads, dim, inner, vocab = MODELS[name]
    tp = int(ranks or 1)
    yield (heads + 2 * kv_heads) * dim // tp, hidden, True
    yield hidden, heads * dim // tp, True
    yield 2 * inner // tp, hidden, True
    yield hidden, inner // tp, True
    yield vocab if tp == 1 else shard_rows(vocab, tp), hidden, False


def plans(rows: int, size: int, depth: int, may_split: bool) -> Iterator[GemmPlan]:
    """Yield the plans that are worth trying for a GEMM [rows, depth] x [depth, size].

    `may_split`: whether the reader of the result adds split-K partials up, so that K may be split.
    """
    tiles_m = (
        {max(16, 1 << (rows - 1).bit_length())} if rows <= 64 else {64, 128, 256} if rows > 128 else {64, 128}
    )
    splits = (1, 2, 3, 4, 6, 8, 12, 16) if may_split else (1,)
    for block_m, block_n, block_k, count, stages, warps, tma in itertools.product(
        tiles_m, (64, 128), (64, 128), splits, (3, 4, 6), (4, 8), (False, True)
    ):
        # Tiles divide N and each split of K evenly, and every program has at least two steps along K.
        if size % block_n or depth % (count * block_k) or depth // count // block_k < 2:
            continue
        programs = size // block_n * count * -(-rows // block_m)
        # Fewer programs leave most of the GPU idle; more would be split further than necessary.
        if may_split and not 48 <= programs <= 700:
            continue
        # The pipeline's stages fit the shared memory, and are large enough to keep loads in flight.
        if not 48 << 10 <= stages * (block_m + block_n) * block_k * 2 <= SHARED:
            continue
        # At most 128 registers per thread for the sums; small tiles by TMA are tried with 4 stages alone.
        if block_m * block_n // (32 * warps) > 128 or (tma and block_m < 64 and stages != 4):
            continue
        yield GemmPlan(tma, block_m, block_n, block_k, count, stages, warps)


def tiles_that_won(table: dict[str, Any]) -> set[GemmPlan]:
    """Return the stored plans of all shapes, without their number of splits."""
    stored = (plan for rows in table.values() for kinds in rows.values() for plan in kinds.values() if plan)
    return {replace(GemmPlan(**plan), splits=1) for plan in stored}


def chain_time(run: Callable[[int], object], copies: int) -> float:
    """Return the microseconds of one of `copies` runs in a graph, the best of four replays.

    `run(i)` uses copy i of the weights, so that no run finds its weights in the GPU's cache.
    """
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            run(i)
    best = float("inf")
    for _ in range(4):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / copies * 1e3)
    return best


def compile_plan(job: tuple[GemmPlan, int, int, int, torch.dtype]) -> None:
    """Compile the kernel of a plan into Triton's cache; runs in a process of its own."""
    plan, rows, size, depth, dtype = job
    x = torch.zeros(rows, depth, dtype=torch.bfloat16, device="cuda")
    weight = torch.zeros(
        size if dtype == torch.bfloat16 else 2 * plan.block_n, depth, dtype=torch.bfloat16, device="cuda"
    )
    gemm.run(plan, x, weight, None, dtype)


def measure(rows: int, size: int, depth: int, may_split: bool, tried: list[GemmPlan]) -> dict[str, object]:
    """Return the best plan of one shape, with and without split-K, and print the times.

    The result maps "split" and "whole" to a plan's fields; None: no plan is clearly faster than cuBLAS. A
    split plan is charged for the time that the reader needs to read its partials.
    """
    dtype = torch.bfloat16 if may_split else torch.float32
    copies = max(2, min(28, int(3e9 // (size * depth * 2))))
    weights = [torch.randn(size, depth, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
    expected = x.float() @ weights[0].float().T
    cublas = chain_time(
        lambda i: (
            torch.mm(x, weights[i].T, out_dtype=dtype) if dtype != x.dtype else torch.mm(x, weights[i].T)
        ),
        copies,
    )
    timed: list[tuple[float, float, GemmPlan]] = []
    for plan in tried:
        result = gemm.run(plan, x, weights[0], None, dtype)
        result = result.sum(0) if plan.splits > 1 else result.float()
        error = ((result - expected).abs().max() / expected.abs().max()).item()
        assert error < 1e-2, (plan, error)
        time_ = chain_time(lambda i, plan=plan: gemm.run(plan, x, weights[i], None, dtype), copies)
        reading = (plan.splits * 4 - 2) * rows * size / MEMORY * 1e6 if plan.splits > 1 else 0.0
        timed.append((time_ + reading, time_, plan))
    timed.sort(key=lambda each: each[0])
    best: dict[str, object] = {}
    for name, allowed in (("split", timed), ("whole", [each for each in timed if each[2].splits == 1])):
        good = allowed and allowed[0][0] < WORTH * cublas
        best[name] = asdict(allowed[0][2]) if good else None
    machine = Machine()
    roofline = max(size * depth * 2 / machine.read, 2 * rows * size * depth / machine.flops) * 1e6
    found = f"roofline {roofline:.2f} cuBLAS {cublas:.2f} best {timed[0][1]:.2f} µs, {timed[0][2]}"
    print(f"{size}x{depth}, {rows} rows: {found}", flush=True)
    return best


def main() -> None:
    """Tune the models named on the command line."""
    begun = time.monotonic()
    table = json.loads(gemm.TABLE.read_text()) if gemm.TABLE.exists() else {}
    device = table.setdefault(torch.cuda.get_device_name(), {})
    won = tiles_that_won(device)
    pending = {
        shape: ":" in model
        for model in sys.argv[1:]
        for shape in shapes(model)
        if ":" not in model or f"{shape[0]}x{shape[1]}" not in device
    }
    tried = {
        (shape, rows): [
            plan for plan in plans(rows, *shape) if not is_shard or replace(plan, splits=1) in won
        ]
        for (shape, is_shard), rows in itertools.product(sorted(pending.items()), ROWS)
    }
    jobs = {}
    for ((size, depth, may_split), rows), candidates in tried.items():
        dtype = torch.bfloat16 if may_split else torch.float32
        for plan in candidates:
            jobs.setdefault((plan, dtype, rows <= 8), (plan, rows, size, depth, dtype))
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        pool.map(compile_plan, list(jobs.values()), chunksize=8)
    print(f"{len(jobs)} kernels compiled in {time.monotonic() - begun:.0f} s", flush=True)
    for ((size, depth, may_split), rows), candidates in tried.items():
        found = device.setdefault(f"{size}x{depth}", {})
        found[str(rows)] = measure(rows, size, depth, may_split, candidates)
        gemm.TABLE.write_text(json.dumps(table, indent=1) + "\n")
    print(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
