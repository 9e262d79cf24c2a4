"""Measures the kernels of a step of one token in their places: a chain of a model's layers in one CUDA graph.

    python -m bench.token_layers 0.6b|8b|DIRECTORY [--fp8] [--keys 600] [--plan qkv=8,2,8 …]

A kernel that is repeated alone does not show what its neighbours do to it: how early its programs find room
on the device, and that its keys and values come from memory. So the plans of `kernels/gemv_plan.py` and the
tiles of `kernels/triton/token_attention.py` were chosen with this benchmark. DIRECTORY has a config.json; all
weights are random. A --plan is for qkv, o, gate_up or down, and consists of the rows of a tile, the programs
per multiprocessor, and the warps per program; each is measured alone, beside the plans of the rule. The time
of a kernel is from the end of its predecessor to its own end, the median over the layers; the time of a layer
is that of all layers, divided by their number.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bench import report, suite
from segue.attention.base import AttentionShape, Context
from segue.kernels.activations import TokenQKV, Unnormed
from segue.kernels.fp8 import FP8
from segue.kernels.gemv_plan import GemvPlan, choose_gemv
from segue.kvcache.page_table import PageTable
from segue.kvcache.pool import KVPool, KVShape
from segue.memory import backing
from segue.models.config import ModelConfig

KERNELS = ("qkv", "attention", "o", "gate_up", "down")  # of a layer, in the order of their launches
PAGE = 64  # tokens
EPS = 1e-6

Weight = tuple[Tensor, Tensor | None]  # the values, and float32 scales `[rows, 1]` if they are in FP8
Plans = dict[tuple[int, int], GemvPlan]  # by the rows and columns of their weights


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the rows and columns of each weight of a layer, by the name of its kernel."""
    width, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "qkv": (width + 2 * kv, hidden),
        "o": (hidden, width),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }


def parse_plan(text: str) -> tuple[str, GemvPlan]:
    """Parse ``qkv=8,2,8``: the name of a kernel, and the numbers of its plan.

    Raises:
        argparse.ArgumentTypeError: `text` has another form.
    """
    found = re.fullmatch(r"(qkv|o|gate_up|down)=(\d+),(\d+),(\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give a plan as NAME=ROWS,PROGRAMS,WARPS for qkv, o, gate_up or down"
        )
    return found[1], GemvPlan(*map(int, found.groups()[1:]))


class Layers:
    """All layers of a model, for one token that attends to `keys` tokens, itself included."""

    def __init__(self, config: ModelConfig, keys: int, *, fp8: bool) -> None:
        """Make random weights, keys and values on the current device."""
        from segue.attention.triton import TritonAttention

        self.device, self.config = torch.device("cuda", torch.cuda.current_device()), config
        self.shapes = shapes_of(config)

        def weight(rows: int, columns: int) -> Weight:
            values = torch.randn(rows, columns, device=self.device, dtype=torch.bfloat16) * 0.03
            return (values.to(FP8), torch.ones(rows, 1, device=self.device)) if fp8 else (values, None)

        self.weights = [
            {name: weight(*shape) for name, shape in self.shapes.items()} for _ in range(config.num_layers)
        ]
        pages = -(-keys // PAGE)
        sizes = KVShape(
            num_pages=pages,
            num_layers=config.num_layers,
            page_size=PAGE,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=torch.bfloat16,
            fp8=fp8,
        )
        pool = KVPool(sizes, backing.zeros(sizes.num_bytes, self.device))
        pool.data.view(torch.uint8).random_(0x30, 0x40)
        table = PageTable(
            max_running=1,
            max_seq_len=keys,
            page_size=PAGE,
            scratch_page=pool.scratch_page,
            device=self.device,
        )
        table.assign(0, 0, list(range(pages)))
        shape = AttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
        )
        self.backend = TritonAttention(shape, pool)
        self.ctx = Context.build(
            input_ids=torch.zeros(1, dtype=torch.int64, device=self.device),
            slots=[0],
            q_lens=[1],
            kv_lens=[keys],
            num_decode=1,
            page_table=table,
            kv=pool,
            backend=self.backend,
        )
        heads = config.num_heads + config.num_kv_heads
        self.qk_weight = torch.ones(heads, config.head_dim, device=self.device) if config.qk_norm else None
        self.angles = torch.rand(2, keys, config.head_dim // 2, device=self.device)
        self.norm = torch.ones(config.hidden_size, device=self.device, dtype=torch.bfloat16)
        self.token = torch.randn(1, config.hidden_size, device=self.device, dtype=torch.bfloat16)

    def run(self) -> Tensor:
        """Run the layers; returns the output of the last down GEMM, `[1, hidden_size]`."""
        from segue.kernels.triton.gemv import gemv

        x, total = self.token, None
        for layer, weights in enumerate(self.weights):

            def multiply(name: str, by: Tensor | Unnormed, weights: dict[str, Weight] = weights) -> Tensor:
                values, scales = weights[name]
                return gemv(by, values, scales, 0, None, torch.bfloat16, gated=name == "gate_up")

            unnormed = Unnormed(x, total, self.norm, EPS, torch.empty_like(x))
            token = TokenQKV(multiply("qkv", unnormed), self.qk_weight, EPS, *self.angles)
            attended = self.backend.attend_token(token, layer, self.ctx)
            assert attended is not None, "this model takes the kernels for several tokens"
            x, total = multiply("o", attended.view(1, -1)), unnormed.total
            unnormed = Unnormed(x, total, self.norm, EPS, torch.empty_like(x))
            x, total = multiply("down", multiply("gate_up", unnormed)), unnormed.total
        return x


def measure(run: Callable[[], object], num_layers: int) -> list[float]:
    """Return the microseconds of a layer, and of each of its kernels in the order of KERNELS."""
    run()  # compiles the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    best, (begin, end) = float("inf"), (torch.Event("cuda", enable_timing=True) for _ in range(2))
    for _ in range(6):
        begin.record()
        for _ in range(10):
            graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 10)
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        for _ in range(4):
            graph.replay()
        torch.cuda.synchronize()
    is_ours = re.compile("_gemv|_attend_token").search
    ends = sorted(each.time_range.end for each in traced.events() if is_ours(each.name))
    count = len(KERNELS)
    times: list[list[float]] = [[] for _ in KERNELS]
    for i in range(count * num_layers, len(ends)):  # the first replay is left out
        times[i % count].append(ends[i] - ends[i - 1])
    return [1e3 * best / num_layers, *(median(each) for each in times)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for the plans of the rule, and one for each plan that is given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--fp8", action="store_true", help="weights, keys and values are in FP8")
    parser.add_argument("--keys", type=int, default=600, help="tokens of context")
    parser.add_argument("--plan", action="append", default=[], type=parse_plan, metavar="NAME=N,N,N")
    args = parser.parse_args(arguments)
    directory = suite.model_dir(args.model) if args.model in suite.SHAPES else args.model
    config = ModelConfig.from_hf(json.loads((Path(directory) / "config.json").read_text()))
    if config.moe is not None:
        parser.error(f"{args.model} has experts, which this chain of layers lacks; give a dense model")
    from segue.kernels.triton import gemv

    layers = Layers(config, args.keys, fp8=args.fp8)
    plans = Plans()

    def choose(size: int, depth: int, **facts: Any) -> GemvPlan:
        return plans.get((size, depth)) or choose_gemv(size, depth, **facts)

    rows = []
    with patch.object(gemv, "choose_gemv", choose):
        for name, plan in [("", None), *args.plan]:
            plans.clear()
            if plan is not None:
                plans[layers.shapes[name]] = plan
            text = f"{name} {plan.block_n},{plan.per_sm},{plan.warps}" if plan else "rule"
            each = measure(layers.run, config.num_layers)
            total = each[0] * config.num_layers / 1e3
            rows.append([text, *(f"{time:.2f}" for time in each), f"{total:.3f}"])
    title = f"{args.model}, {args.keys} tokens of context: µs"
    report.show(title, ["plan", "layer", *KERNELS, "all layers, ms"], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
