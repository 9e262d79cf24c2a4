"""Measures the best plan of each GEMM of a decode step, and stores it in the table that the kernels read.

    python -m bench.tune_gemm qwen3-0.6b qwen3-8b qwen3-8b:2 qwen3-8b:4

`:2` means one rank's shard of tensor parallel 2; only tiles that are best for a whole model are tried for it.
Every plan is timed as a chain of GEMMs with different weights in one CUDA graph, so that neither launches nor
cached weights flatter it, against cuBLAS in the same chain. For split-K partials, the time to read them is
added. Only the measured shapes are replaced in the table. The times of all plans go to a result file.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple

import torch

from bench import report
from bench.roofline import Machine
from segue.kernels.gemm_plan import WORTH, GemmPlan, GemmShape, tile, valid_plans
from segue.kernels.plan_store import table_of
from segue.kernels.triton import gemm
from segue.kernels.triton.launch import device_facts
from segue.kernels.triton.plan_timing import ChainTimer
from segue.models.sharding import shard_rows

# hidden, query heads, KV heads, head size, intermediate, vocabulary
MODELS = {
    "qwen3-0.6b": (1024, 16, 8, 128, 3072, 151936),
    "qwen3-8b": (4096, 32, 8, 128, 12288, 151936),
}
ROWS = (4, 8, 16, 32, 64, 96, 128, 192, 256)
MEMORY = 3.5e12  # bytes per second at which split-K partials are read
TIMES = "gpu_tune_gemm"  # the result file that gets the times of all plans, for bench.fit_gemm


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


def chain_time(run: Callable[[int], object], copies: int) -> float:
    """Return the microseconds of one of `copies` runs in a graph; see `ChainTimer`."""
    return ChainTimer()(run, copies)


def compile_plan(job: tuple[GemmPlan, int, int, int, torch.dtype]) -> None:
    """Compile the kernel of a plan into Triton's cache; runs in a process of its own."""
    plan, rows, size, depth, dtype = job
    x = torch.zeros(rows, depth, dtype=torch.bfloat16, device="cuda")
    weight = torch.zeros(
        size if dtype == torch.bfloat16 else 2 * plan.block_n, depth, dtype=torch.bfloat16, device="cuda"
    )
    gemm.run(plan, x, weight, None, dtype)


def measure(
    rows: int, size: int, depth: int, may_split: bool, tried: list[GemmPlan]
) -> tuple[dict[str, object], dict[str, object]]:
    """Return the best plan of one shape, with and without split-K, and the times of all; print some of them.

    The first result maps "split" and "whole" to a plan's fields; None: no plan is clearly faster than cuBLAS.
    A split plan is charged for the time that the reader needs to read its partials.
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
    times = [[round(with_reading, 3), *astuple(plan)] for with_reading, _, plan in timed]
    return best, {"cuBLAS": round(cublas, 3), "plans": times}


def main() -> None:
    """Tune the models named on the command line."""
    begun = time.monotonic()
    tables, facts = json.loads(gemm.TABLE.read_text()) if gemm.TABLE.exists() else [], device_facts()
    device = table_of(tables, facts)
    won = gemm.tiles_that_won()
    pending = {
        shape: ":" in model
        for model in sys.argv[1:]
        for shape in shapes(model)
        if ":" not in model or f"{shape[0]}x{shape[1]}" not in device
    }
    tried = {
        (shape, rows): [
            plan
            for plan in valid_plans(GemmShape(rows, *shape[:2], kind="split" if shape[2] else "whole"), facts)
            if not is_shard or tile(plan) in won
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
    times: dict[tuple[str, int], dict[str, object]] = {}
    for ((size, depth, may_split), rows), candidates in tried.items():
        key = f"{size}x{depth}"
        found, times[key, rows] = measure(rows, size, depth, may_split, candidates)
        device.setdefault(key, {})[str(rows)] = found
        gemm.TABLE.write_text(json.dumps(tables, indent=1) + "\n")
        report.save(
            TIMES, {"us": [{"shape": shape, "rows": n, **each} for (shape, n), each in times.items()]}
        )
    print(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
