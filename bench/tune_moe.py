"""Measures the best plan of the two grouped GEMMs of a mixture of experts; stores it where the kernels look.

    python -m bench.tune_moe qwen3-30b-a3b

Each GEMM is timed alone, in one CUDA graph over several routings of random tokens, with every tile
configuration. Then the best configurations of both GEMMs are timed together, for each tile size, including
the sorting and the sum over experts. Only the measured shapes are replaced in the table.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor

from bench.tune_gemm import chain_time
from segue.kernels.ops import route
from segue.kernels.plan_store import table_of
from segue.kernels.triton import moe
from segue.kernels.triton.launch import device_facts
from segue.kernels.triton.moe import MoEPlan, TileConfig
from segue.kernels.triton.moe_routing import sort

# experts, experts per token, expert size, hidden size
MODELS = {"qwen3-30b-a3b": (128, 8, 768, 2048)}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
TOGETHER = 2  # best configurations of each GEMM, timed in all combinations
COPIES = 2  # copies of the weights
ROUTINGS = 6  # routings per graph: few tokens choose other experts in each

Shape = tuple[int, int, int, int]
Job = tuple[str, int, TileConfig]  # GEMM, pairs per tile, configuration


def blocks(tokens: int, shape: Shape) -> list[int]:
    """Return the tile sizes that are worth trying."""
    pairs = tokens * shape[1] / shape[0]  # per expert
    found = [block for block in (16, 32, 64, 128) if pairs <= 4 * block and block <= max(16, 4 * pairs)]
    return ([1] if tokens <= 16 else []) + found


def tile_configs(gemm: str, block: int, shape: Shape) -> Iterator[TileConfig]:
    """Yield the configurations that are worth trying for tiles of `block` pairs of a token and an expert.

    A `block` of 1 stands for the kernels without tiles. The conditions keep what is in flight within the
    shared memory and the sums within the registers, and otherwise bound the number of trials.
    """
    depth, size = (shape[3], shape[2]) if gemm == "gate_up" else (shape[2], shape[3])
    if block == 1:
        for rows, deep, stages, warps in itertools.product((4, 8, 16), (256, 512), (1, 2, 3), (2, 4, 8)):
            if 8 <= rows * deep // (32 * warps) <= 64:
                yield TileConfig(rows, deep, stages, warps)
        return
    weights = 2 if gemm == "gate_up" else 1
    for rows, deep, stages, warps, tma in itertools.product(
        (64, 128, 256), (64, 128), (2, 3, 4, 5), (4, 8), (False, True)
    ):
        held = stages * (weights * rows + block) * deep * 2
        accumulated = weights * rows * block // (32 * warps)
        if (
            depth % deep
            or size % rows
            or not 40 << 10 <= held <= device_facts().shared_bytes
            or accumulated > 128
        ):
            continue
        if (block >= 64 and (deep == 128 or stages < 3 or weights * rows * block < 128 * 64)) or (
            block < 64 and (rows == 256 or accumulated < 4)
        ):
            continue
        yield TileConfig(rows, deep, stages, warps, tma)
        if tma and block == 128:
            yield TileConfig(rows, deep, stages, warps, tma, halves=True)


class Case:
    """Random weights, and random routings of `tokens` tokens."""

    def __init__(self, shape: Shape, tokens: int, weights: list[tuple[Tensor, Tensor]]) -> None:
        """Draw ROUTINGS batches of `tokens` tokens, each routed by random logits.

        `weights`: several copies of a layer's weights, (gate and up, down), to be used in turns.
        """
        num_experts, per_token, _, hidden = shape
        self.tokens, self.weights = tokens, weights
        self.inputs = []
        for _ in range(ROUTINGS):
            x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
            logits = torch.randn(tokens, num_experts, device="cuda")
            self.inputs.append((x, *route(logits, per_token, renormalise=True)))

    def gemm(self, gemm: str, block: int, config: TileConfig) -> float:
        """Return the microseconds of one GEMM, "gate_up" or "down", without the sorting of its pairs."""
        prepared = []
        for i, (x, factors, experts) in enumerate(self.inputs):
            gate_up, down = self.weights[i % COPIES]
            inner = torch.randn(experts.numel(), down.shape[2], device="cuda", dtype=torch.bfloat16)
            if block == 1:
                if gemm == "gate_up":
                    prepared.append((moe.gate_up_by_pair, (config, x, gate_up, factors, experts)))
                else:
                    prepared.append((moe.down_by_token, (config, inner, down, experts)))
                continue
            order, tiles = sort(experts, gate_up.shape[0], block)
            if gemm == "gate_up":
                prepared.append((moe.gemm_by_tile, (block, config, x, gate_up, factors, order, tiles)))
            else:
                prepared.append((moe.gemm_by_tile, (block, config, inner, down, None, order, tiles)))
        return chain_time(lambda i: prepared[i][0](*prepared[i][1]), ROUTINGS)

    def whole(self, plan: MoEPlan) -> float:
        """Return the microseconds of everything after the routing."""
        return chain_time(
            lambda i: moe.run_experts(
                self.inputs[i][0], *self.weights[i % COPIES], *self.inputs[i][1:], plan=plan
            ),
            ROUTINGS,
        )


def attempt(measure: Callable[[], float], label: object) -> float:
    """Return `measure()`, or infinity if the device cannot run it."""
    try:
        return measure()
    except Exception as error:
        print(f"{label}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return float("inf")


def measure(shape: Shape, tokens: int, weights: list[tuple[Tensor, Tensor]]) -> dict[str, object]:
    """Return the best plan of one shape for `tokens` tokens."""
    case = Case(shape, tokens, weights)
    found: list[tuple[float, MoEPlan]] = []
    for block in blocks(tokens, shape):
        first, second = (best(case, gemm, block, shape) for gemm in ("gate_up", "down"))
        plans = [MoEPlan(block, *each) for each in itertools.product(first, second)]
        timed = [(attempt(partial(case.whole, plan), plan), plan) for plan in plans]
        found.append(min(timed, key=lambda each: each[0]))
        print(f"{tokens} tokens, tiles of {block}: {found[-1][0]:.1f} µs, {found[-1][1]}", flush=True)
    return asdict(min(found, key=lambda each: each[0])[1])


def best(case: Case, gemm: str, block: int, shape: Shape) -> list[TileConfig]:
    """Return the fastest configurations of one GEMM, and print their times."""
    timed = [
        (attempt(partial(case.gemm, gemm, block, config), (gemm, block, config)), config)
        for config in tile_configs(gemm, block, shape)
    ]
    timed.sort(key=lambda each: each[0])
    first = "; ".join(f"{microseconds:.1f} {show(config)}" for microseconds, config in timed[:4])
    print(f"{case.tokens} tokens, tiles of {block}, {gemm}: {first}; {timed[-1][0]:.1f}", flush=True)
    return [config for _, config in timed[:TOGETHER]]


def show(config: TileConfig) -> str:
    """Return a short text for a configuration."""
    flags = "t" * config.tma + "h" * config.halves
    return f"{config.block_n}x{config.block_k}s{config.stages}w{config.warps}{flags}"


def compile_kernel(job: tuple[Shape, Job]) -> None:
    """Compile the kernel of a job into Triton's cache; runs in a process of its own."""
    (_, per_token, size, hidden), (gemm, block, config) = job
    few = 16
    gate_up = torch.zeros(few, 2 * size, hidden, dtype=torch.bfloat16, device="cuda")
    down = torch.zeros(few, hidden, size, dtype=torch.bfloat16, device="cuda")
    case = Case((few, per_token, size, hidden), 64, [(gate_up, down)] * COPIES)
    attempt(partial(case.gemm, gemm, block, config), job)


def compile_kernels(shapes: list[Shape]) -> None:
    """Compile every kernel that will be timed."""
    begun = time.monotonic()
    jobs = {
        (shape, (gemm, block, config))
        for shape, tokens, gemm in itertools.product(shapes, TOKENS, ("gate_up", "down"))
        for block in blocks(tokens, shape)
        for config in tile_configs(gemm, block, shape)
    }
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        pool.map(compile_kernel, list(jobs), chunksize=4)
    print(f"{len(jobs)} kernels compiled in {time.monotonic() - begun:.0f} s", flush=True)


def tune(shapes: list[Shape]) -> None:
    """Measure the shapes and store their best plans."""
    begun = time.monotonic()
    tables = json.loads(moe.TABLE.read_text()) if moe.TABLE.exists() else []
    device = table_of(tables, device_facts())
    for shape in shapes:
        num_experts, _, size, hidden = shape
        weights = [
            (
                torch.randn(num_experts, 2 * size, hidden, device="cuda", dtype=torch.bfloat16),
                torch.randn(num_experts, hidden, size, device="cuda", dtype=torch.bfloat16),
            )
            for _ in range(COPIES)
        ]
        device["x".join(map(str, shape))] = {str(n): measure(shape, n, weights) for n in TOKENS}
        moe.TABLE.write_text(json.dumps(tables, indent=1) + "\n")
    print(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    named = [MODELS[name] for name in sys.argv[1:]]
    compile_kernels(named)
    tune(named)
