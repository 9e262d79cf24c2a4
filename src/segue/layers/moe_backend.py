"""MoE backends, which run the experts that the router has chosen for each token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from segue.errors import ConfigError
from segue.kernels import batch_invariant
from segue.kernels.batch_invariant import BatchInvariantGemm
from segue.kernels.cpu import ops as cpu
from segue.kernels.fp8 import ExpertWeights
from segue.kernels.ops import Plain, silu_mul


class MoEBackend(Protocol):
    """Runs each token through its experts: E experts, k per token, hidden size H, I rows per expert."""

    def __call__(
        self, x: Tensor, gate_up: ExpertWeights, down: ExpertWeights, weights: Tensor, experts: Tensor
    ) -> Tensor:
        """Returns the weighted sum of the outputs of each token's experts, `[T, H]`.

        `x` is `[T, H]`, `gate_up` `[E, 2 * I, H]` (gate rows first), `down` `[E, H, I]`, `weights` float32
        `[T, k]`, `experts` of an integer dtype `[T, k]`. Expert E does not exist: it adds nothing to a token,
        even if the token is NaN.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEEntry:
    """One backend and where it can run."""

    name: str
    devices: tuple[str, ...]  # torch device types
    graph: bool  # can be captured in a CUDA graph: the host reads no values
    run: MoEBackend
    deterministic: bool = False  # batch-invariant: a token's bits depend on no other token


def run_expert(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Runs tokens `x` `[T, H]` through one expert: `down @ (silu(gate @ x) * (up @ x))`, `[T, H]`.

    `gate_up` is `[2 * I, H]`, gate rows first, and `down` `[H, I]`.
    """
    if cpu.usable(x):
        return _run_expert_cpu(x, gate_up, down, invariant=False)
    return F.linear(silu_mul(F.linear(x, gate_up), x.dtype), down)


def _run_expert_cpu(x: Tensor, gate_up: Tensor, down: Tensor, *, invariant: bool) -> Tensor:
    """`run_expert` by the CPU's own kernels."""
    activated = cpu.gate_up_silu(x, gate_up, invariant=invariant)
    return cpu.gemm(activated, down, None, x.dtype, invariant=invariant)


def run_expert_batch_invariant(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Batch-invariant `run_expert`, for CPUs.

    Without the CPU's own kernels, the sizes that the GEMMs may have are found once per shape of a weight, so
    that making them here is cheap.
    """
    if cpu.usable(x):
        return _run_expert_cpu(x, gate_up, down, invariant=True)
    gated = batch_invariant.silu_mul(BatchInvariantGemm.from_weight(gate_up, Plain)(x, None), x.dtype)
    return BatchInvariantGemm.from_weight(down, Plain)(gated, None)


def select(name: str, device: torch.device, *, deterministic: bool = False) -> MoEEntry:
    """Returns the backend called `name`, or for "auto" the first one that can be used.

    A backend can be used if it runs on `device` and, with `deterministic`, is deterministic.

    Raises:
        ConfigError: there is no such backend, or it cannot be used.
    """
    for entry in _BACKENDS:
        fits = device.type in entry.devices and (entry.deterministic or not deterministic)
        if name in ("auto", entry.name) and fits:
            return entry
    mode = " with --deterministic" if deterministic else ""
    names = ", ".join(entry.name for entry in _BACKENDS)
    raise ConfigError(
        f"MoE backend {name!r} does not run on {device.type}{mode}; use 'auto', or another one of {names}"
    )


def run_by_expert(
    x: Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    weights: Tensor,
    experts: Tensor,
    run_one: Callable[[Tensor, Tensor, Tensor], Tensor] = run_expert,
) -> Tensor:
    """Sort the (token, expert) pairs by expert, then run each expert over its consecutive tokens.

    Arguments and result are those of `MoEBackend`. `run_one` runs tokens through one expert, as
    `run_expert` does.
    """
    num_experts, per_token = gate_up.shape[0], experts.shape[1]
    # Pairs of expert E, which does not exist, are sorted to the end and cut off.
    counts = experts.flatten().bincount(minlength=num_experts)[:num_experts].tolist()
    order = experts.flatten().argsort(stable=True)[: sum(counts)]
    tokens = order // per_token
    grouped = x.index_select(0, tokens)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            run = grouped[start : start + count]
            run.copy_(run_one(run, gate_up[expert], down[expert]))
            start += count
    grouped.mul_(weights.flatten()[order, None].to(x.dtype))
    return torch.zeros_like(x).index_add_(0, tokens, grouped)


def run_triton(
    x: Tensor, gate_up: ExpertWeights, down: ExpertWeights, weights: Tensor, experts: Tensor
) -> Tensor:
    """See `kernels.triton.moe.run_experts`."""
    from segue.kernels.triton.moe import run_experts  # Triton is only installed with CUDA

    return run_experts(x, gate_up, down, weights, experts)


# In order of preference: "auto" takes the first one that can be used, see `select`.
_BACKENDS = (
    MoEEntry(name="triton", devices=("cuda",), graph=True, run=run_triton),
    MoEEntry(name="torch", devices=("cpu", "cuda"), graph=False, run=run_by_expert),
    MoEEntry(
        name="torch-invariant",
        devices=("cpu",),
        graph=False,
        run=partial(run_by_expert, run_one=run_expert_batch_invariant),
        deterministic=True,
    ),
)
