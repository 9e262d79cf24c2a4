"""Measures a layer of experts in a CUDA graph, beside its roofline and beside vLLM's fused experts.

    python -m bench.moe [--peer]

The layer is that of Qwen3-30B-A3B: hidden size 2048, 128 experts of 768, 8 per token, bf16. Weights, hidden
states and router logits are random; a graph runs several layers, so that no weight is in the cache by chance.
One time is from the router's logits to the layer's output, the other leaves the routing out. `--peer` needs
vLLM.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from bench.report import save, show
from bench.roofline import Machine
from bench.tune_gemm import chain_time
from segue.kernels.ops import route
from segue.kernels.triton.moe import run_experts

HIDDEN, EXPERTS, PER_TOKEN, SIZE = 2048, 128, 8, 768
TOKENS = (1, 32, 256, 4096)
LAYERS, RUNS = 4, 8  # layers with weights of their own; runs per graph, each with other tokens

Layer = tuple[Tensor, Tensor]  # gate_up, down
Experts = Callable[[Tensor, Layer, Tensor, Tensor], Tensor]
Route = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def roofline(routed: list[Tensor]) -> float:
    """Return the least microseconds: the chosen experts read once, or the operations of all pairs."""
    machine = Machine()
    distinct = sum(experts.unique().numel() for experts in routed) / len(routed)
    read = distinct * 3 * SIZE * HIDDEN * 2 / machine.read
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


def main() -> None:
    """Print and store the figures."""
    engines = {"segue": ours(), **({"vllm": peers()} if "--peer" in sys.argv else {})}
    torch.manual_seed(0)
    layers = [
        (
            torch.randn(EXPERTS, 2 * SIZE, HIDDEN, device="cuda", dtype=torch.bfloat16) * HIDDEN**-0.5,
            torch.randn(EXPERTS, HIDDEN, SIZE, device="cuda", dtype=torch.bfloat16) * SIZE**-0.5,
        )
        for _ in range(LAYERS)
    ]
    figures = [measure(tokens, layers, engines) for tokens in TOKENS]
    names = list(figures[0])
    show(
        "experts, microseconds per layer", names, [[f"{figure[n]:.1f}" for n in names] for figure in figures]
    )
    save("gpu_moe", {"layers": figures})


if __name__ == "__main__":
    main()
