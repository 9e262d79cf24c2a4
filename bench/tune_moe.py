"""Measures the best plan of the two grouped GEMMs of a mixture of experts; stores it where the kernels look.

    python -m bench.tune_moe qwen3-30b-a3b [qwen3-30b-a3b-fp8 ...] [--tokens 1 64]

Each GEMM is timed alone, in one CUDA graph over several routings of random tokens, with every tile
configuration. Then the best configurations of both GEMMs are timed together, for each tile size, including
the sorting and the sum over experts. In the table only the measured shapes and numbers of tokens change.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial

import torch

from bench.moe import SHAPES, Layer, attempt, random_layer
from bench.tune_gemm import chain_time
from segue.kernels.moe_plan import MoEPlan, MoEShape, TileConfig, is_valid
from segue.kernels.ops import route
from segue.kernels.plan_store import table_of
from segue.kernels.triton import moe
from segue.kernels.triton.launch import device_facts
from segue.kernels.triton.moe_routing import sort

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
TOGETHER = 2  # best configurations of each GEMM, timed in all combinations
COPIES = 2  # copies of the weights
ROUTINGS = 6  # routings per graph: few tokens choose other experts in each

Job = tuple[str, int, TileConfig]  # GEMM, pairs per tile, configuration


def blocks(tokens: int, shape: MoEShape) -> list[int]:
    """Return the tile sizes that are worth trying."""
    pairs = shape.pairs(tokens)
    found = [block for block in (16, 32, 64, 128) if pairs <= 4 * block and block <= max(16, 4 * pairs)]
    return ([1] if tokens <= 16 else []) + found


def tile_configs(gemm: str, block: int, shape: MoEShape) -> Iterator[TileConfig]:
    """Yield the configurations that are worth trying for tiles of `block` pairs of a token and an expert.

    A `block` of 1 stands for the kernels without tiles. The conditions keep what is in flight within the
    shared memory and the sums within the registers, and otherwise bound the number of trials.
    """
    if block == 1:
        for rows, deep, stages, warps in itertools.product((4, 8, 16), (256, 512), (1, 2, 3), (2, 4, 8)):
            if 8 <= rows * deep // (32 * warps) <= 64:
                yield TileConfig(rows, deep, stages, warps)
        return
    weights = 2 if gemm == "gate_up" else 1
    for rows, deep, stages, warps, tma in itertools.product(
        (64, 128, 256), (64, 128), (2, 3, 4, 5), (4, 8), (False, True)
    ):
        config = TileConfig(rows, deep, stages, warps, tma)
        other = TileConfig(16, 16, 1, 8)  # of the GEMM that is not asked for
        plan = MoEPlan(block, config, other) if gemm == "gate_up" else MoEPlan(block, other, config)
        held = stages * (weights * rows * shape.element + block * 2) * deep
        accumulated = weights * rows * block // (32 * warps)
        if (
            held < shape.element * (20 << 10)
            or accumulated > 128
            or not is_valid(plan, shape, device_facts())
        ):
            continue
        if (block >= 64 and (deep == 128 or stages < 3 or weights * rows * block < 128 * 64)) or (
            block < 64 and (rows == 256 or accumulated < 4)
        ):
            continue
        yield config
        if tma and block == 128:
            yield replace(config, halves=True)


class Case:
    """Random weights, and random routings of `tokens` tokens."""

    def __init__(self, shape: MoEShape, tokens: int, weights: list[Layer]) -> None:
        """Draw ROUTINGS batches of `tokens` tokens, each routed by random logits.

        `weights`: several copies of a layer's weights, (gate and up, down), to be used in turns.
        """
        self.tokens, self.weights = tokens, weights
        self.inputs = []
        for _ in range(ROUTINGS):
            x = torch.randn(tokens, shape.hidden, device="cuda", dtype=torch.bfloat16)
            logits = torch.randn(tokens, shape.num_experts, device="cuda")
            self.inputs.append((x, *route(logits, shape.per_token, renormalise=True)))

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


def measure(shape: MoEShape, tokens: int, weights: list[Layer]) -> dict[str, object]:
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


def best(case: Case, gemm: str, block: int, shape: MoEShape) -> list[TileConfig]:
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


def compile_kernel(job: tuple[MoEShape, Job]) -> None:
    """Compile the kernel of a job into Triton's cache; runs in a process of its own."""
    shape, (gemm, block, config) = job
    few = replace(shape, num_experts=16)
    case = Case(few, 64, [random_layer(few)] * COPIES)
    attempt(partial(case.gemm, gemm, block, config), job)


def compile_kernels(shapes: Sequence[MoEShape], tokens: Sequence[int]) -> None:
    """Compile every kernel that will be timed."""
    begun = time.monotonic()
    jobs = {
        (shape, (gemm, block, config))
        for shape, count, gemm in itertools.product(shapes, tokens, ("gate_up", "down"))
        for block in blocks(count, shape)
        for config in tile_configs(gemm, block, shape)
    }
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        pool.map(compile_kernel, list(jobs), chunksize=4)
    print(f"{len(jobs)} kernels compiled in {time.monotonic() - begun:.0f} s", flush=True)


def tune(shapes: Sequence[MoEShape], tokens: Sequence[int]) -> None:
    """Measure the shapes and store their best plans."""
    begun = time.monotonic()
    tables = json.loads(moe.TABLE.read_text()) if moe.TABLE.exists() else []
    device = table_of(tables, device_facts())
    for shape in shapes:
        weights = [random_layer(shape) for _ in range(COPIES)]
        found = device.get(shape.key, {}) | {str(n): measure(shape, n, weights) for n in tokens}
        device[shape.key] = {n: found[n] for n in sorted(found, key=int)}
        moe.TABLE.write_text(json.dumps(tables, indent=1) + "\n")
    print(f"{time.monotonic() - begun:.0f} s")


def main() -> None:
    """Tune the shapes that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shapes", nargs="+", choices=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    args = parser.parse_args()
    shapes = [SHAPES[name] for name in args.shapes]
    compile_kernels(shapes, args.tokens)
    tune(shapes, args.tokens)


if __name__ == "__main__":
    main()
