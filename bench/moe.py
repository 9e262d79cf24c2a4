"""Measures a layer of experts in a CUDA graph, beside its roofline and beside vLLM's fused experts.

    python -m bench.moe [--peer | --fp8]

The layer is that of Qwen3-30B-A3B: hidden size 2048, 128 experts of 768, 8 per token, bf16. Weights, hidden
states and router logits are random; a graph runs several layers, so that no weight is in the cache by chance.
One time is from the router's logits to the layer's output, the other leaves the routing out. `--peer` needs
vLLM. `--fp8` compares them with experts in FP8, whose plans it finds as a start does, and shows every plan
that was tried.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bench.report import save, show
from bench.roofline import Machine
from bench.tune_gemm import chain_time
from segue.kernels.fp8 import ExpertWeights, FP8Experts
from segue.kernels.model_gemm import ModelExperts
from segue.kernels.moe_plan import MoEPlan, MoEShape
from segue.kernels.ops import route
from segue.kernels.plan_store import PlanCache
from segue.kernels.triton import plan_timing
from segue.kernels.triton.launch import device_facts
from segue.kernels.triton.moe import run_experts
from segue.kernels.triton.plan_tasks import plan_tasks
from segue.layers.moe_backend import run_by_expert
from segue.sizes import ceil_div

HIDDEN, EXPERTS, PER_TOKEN, SIZE = 2048, 128, 8, 768
SHAPES = {  # in FP8 with a scale per row, or for each 128 columns of one
    "qwen3-30b-a3b": MoEShape(EXPERTS, PER_TOKEN, SIZE, HIDDEN),
    "qwen3-30b-a3b-fp8": MoEShape(EXPERTS, PER_TOKEN, SIZE, HIDDEN, 0),
    "qwen3-30b-a3b-fp8-blocks": MoEShape(EXPERTS, PER_TOKEN, SIZE, HIDDEN, 128),
}
TOKENS = (1, 32, 256, 4096)
TOKENS_FP8 = (1, 4, 16, 64, 256, 1024, 4096)
LAYERS, RUNS = 4, 8  # layers with weights of their own; runs per graph, each with other tokens

Layer = tuple[ExpertWeights, ExpertWeights]  # gate_up, down
Routed = tuple[Tensor, Tensor]  # weights, experts
Experts = Callable[[Tensor, Layer, Tensor, Tensor], Tensor]
Route = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def random_layer(shape: MoEShape) -> Layer:
    """Return random weights of a layer's experts."""

    def weight(rows: int, columns: int) -> ExpertWeights:
        values = torch.randn(shape.num_experts, rows, columns, device="cuda", dtype=torch.bfloat16)
        if shape.fp8_block is None:
            return values.mul_(columns**-0.5)
        blocks = ceil_div(columns, shape.fp8_block or columns)
        scales = torch.rand(shape.num_experts, rows, blocks, device="cuda").add_(0.5).mul_(columns**-0.5 / 32)
        return FP8Experts(values.mul_(32).to(torch.float8_e4m3fn), scales, shape.fp8_block, torch.bfloat16)

    return weight(2 * shape.size, shape.hidden), weight(shape.hidden, shape.size)


def attempt(measure: Callable[[], float], label: object) -> float:
    """Return `measure()`, or infinity if the device cannot run it."""
    try:
        return measure()
    except Exception as error:
        print(f"{label}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return float("inf")


def roofline(routed: Sequence[Tensor], element: int = 2) -> float:
    """Return the least microseconds: the chosen experts read once, or the operations of all pairs."""
    machine = Machine()
    distinct = sum(experts.unique().numel() for experts in routed) / len(routed)
    read = distinct * 3 * SIZE * HIDDEN * element / machine.read
    return max(read, routed[0].numel() * 2 * 3 * SIZE * HIDDEN / machine.flops) * 1e6


def ours() -> tuple[Route, Experts]:
    """Return Segue's kernels."""
    return (
        lambda x, logits: route(logits, PER_TOKEN, renormalise=True),
        lambda x, layer, weights, experts: run_experts(x, *layer, weights, experts),
    )


def peers() -> tuple[Route, Experts]:
    """Return vLLM's kernels."""
    from vllm.model_executor.layers.fused_moe import fused_experts, fused_topk

    return (
        lambda x, logits: fused_topk(x, logits, PER_TOKEN, True)[:2],
        lambda x, layer, weights, experts: fused_experts(x, *layer, weights, experts),
    )


def measure(tokens: int, layers: list[Layer], engines: dict[str, tuple[Route, Experts]]) -> dict[str, float]:
    """Return the microseconds per layer; check that the engines' results agree."""
    inputs = [
        (
            torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16),
            torch.randn(tokens, EXPERTS, device="cuda", dtype=torch.bfloat16),
        )
        for _ in range(RUNS)
    ]
    routed = [engines["segue"][0](x, logits) for x, logits in inputs]
    figure = {"tokens": float(tokens), "floor_us": roofline([experts for _, experts in routed])}
    results = {}
    for name, (choose, run) in engines.items():

        def layer(i: int, choose: Route = choose, run: Experts = run) -> Tensor:
            return run(inputs[i][0], layers[i % LAYERS], *choose(*inputs[i]))

        def experts(i: int, run: Experts = run) -> Tensor:
            return run(inputs[i][0], layers[i % LAYERS], *routed[i])

        results[name] = experts(0).float()
        figure[f"{name}_us"] = min(chain_time(layer, RUNS) for _ in range(3))
        figure[f"{name}_experts_us"] = min(chain_time(experts, RUNS) for _ in range(3))
    if "vllm" in results:
        difference = float((results["segue"] - results["vllm"]).norm() / results["vllm"].norm())
        assert difference < 0.02, (tokens, difference)
    return figure


def measure_kind(name: str, shape: MoEShape) -> tuple[list[list[str]], list[list[str]]]:
    """Find the plans of a kind of experts as a start does, and measure them without the routing.

    Returns:
        Roofline and microseconds for each of TOKENS_FP8, and a line per plan that was tried.
    """
    own = ModelExperts(weights=[random_layer(shape) for _ in range(LAYERS)], per_token=PER_TOKEN)
    tasks = plan_tasks([own], {}, device_facts())
    with tempfile.TemporaryDirectory() as directory:
        cache = PlanCache.of(Path(directory), device_facts(), {})
        found, text = plan_timing.find_plans([own], cache, budget_s=60)
    plan_timing.use_plans(found)
    print(f"{name}: {text}", flush=True)
    figures, tried = [], []
    for tokens in TOKENS_FP8:
        x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
        routed = [
            route(torch.randn(tokens, EXPERTS, device="cuda"), PER_TOKEN, renormalise=True, num_unpadded=None)
            for _ in range(RUNS)
        ]

        def run(plan: MoEPlan | None, i: int, x: Tensor = x, routed: list[Routed] = routed) -> Tensor:
            return run_experts(x, *own.weights[i % LAYERS], *routed[i], plan=plan)

        if tokens <= 16:
            values = [each.values() if isinstance(each, FP8Experts) else each for each in own.weights[0]]
            exact = run_by_expert(x.float(), values[0].float(), values[1].float(), *routed[0])
            error = float((run(None, 0).float() - exact).norm() / exact.norm())
            assert error < 0.01, (name, tokens, error)
        floor = roofline([experts for _, experts in routed], shape.element)
        taken = min(chain_time(partial(run, None), RUNS) for _ in range(3))
        figures.append([f"{floor:.1f}", f"{taken:.1f}"])
        plans = [
            plan for task in tasks if task.place[1] == str(tokens) for plan in (*task.compared, *task.plans)
        ]
        times = {plan: attempt(partial(chain_time, partial(run, plan), RUNS), plan) for plan in plans}
        for plan in sorted(times, key=times.__getitem__):
            text = re.sub(r"\w+=|[A-Z]\w+(?=\()", "", str(plan))
            tried.append([name, str(tokens), f"{times[plan]:.1f}", text])
    return figures, tried


def compare_fp8() -> None:
    """Print the times of experts in bfloat16 and in FP8, and of every plan that was tried in FP8."""
    found = [measure_kind(*each) for each in SHAPES.items()]
    show(
        "plans that were tried", ["", "tokens", "us", "plan"], [line for _, tried in found for line in tried]
    )
    header = [f"{name.removeprefix('qwen3-')} {what}" for name in SHAPES for what in ("floor", "us")]
    lines = [
        [f"{tokens}", *(text for figures, _ in found for text in figures[number])]
        for number, tokens in enumerate(TOKENS_FP8)
    ]
    show("experts without routing, microseconds per layer", ["tokens", *header], lines)


def main() -> None:
    """Print and store the figures."""
    if "--fp8" in sys.argv:
        compare_fp8()
        return
    engines = {"segue": ours(), **({"vllm": peers()} if "--peer" in sys.argv else {})}
    torch.manual_seed(0)
    layers = [random_layer(SHAPES["qwen3-30b-a3b"]) for _ in range(LAYERS)]
    figures = [measure(tokens, layers, engines) for tokens in TOKENS]
    names = list(figures[0])
    show(
        "experts, microseconds per layer", names, [[f"{figure[n]:.1f}" for n in names] for figure in figures]
    )
    save("gpu_moe", {"layers": figures})


if __name__ == "__main__":
    main()
