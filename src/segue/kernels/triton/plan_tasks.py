"""What the search for plans times: each GEMM of a model, and the experts of its layers, by number of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from segue.kernels import fp8_plan, gemm_plan, moe_plan
from segue.kernels.fp8_plan import FP8Plan, FP8Shape
from segue.kernels.gemm_plan import ELEMENT, DeviceFacts, GemmPlan, GemmShape, fewest_rows
from segue.kernels.model_gemm import ModelExperts, ModelFP8Gemm, ModelGemm, Planned
from segue.kernels.moe_plan import MoEPlan
from segue.kernels.plan_store import Plans, stored_plans
from segue.kernels.triton import fp8_gemm, gemm, moe
from segue.kernels.triton.gate_up_silu import silu_mul
from segue.kernels.triton.moe_routing import route

MIN_BYTES = 1 << 20  # a smaller weight takes a few microseconds by any plan


class PlanTask(Protocol):
    """What is to be timed: one GEMM, or the experts of a layer, for one number of rows."""

    @property
    def plans(self) -> Sequence[Any]:
        """What to try."""

    @property
    def place(self) -> tuple[str, str, str]:
        """Key, number of rows and kind of its plan in tables."""

    @property
    def seconds(self) -> float:
        """Roughly how long one run takes."""

    def of_fewest(self) -> PlanTask | None:
        """Returns the same task with the fewest rows that its plan serves; None if that is not timed."""

    def inputs(self) -> tuple[Tensor, ...]:
        """Returns random inputs."""

    def run(self, plan: Any, inputs: tuple[Tensor, ...], copy: int = 0) -> Tensor:
        """Run it with a plan, and the weights of one layer; None: what the plans are compared with."""

    def reading(self, plan: Any) -> float:
        """Returns the microseconds that the reader of the result of `run` loses by this plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTask:
    """One GEMM with one number of rows."""

    gemm: ModelGemm
    shape: GemmShape
    plans: Sequence[GemmPlan]
    bandwidth: float

    @property
    def place(self) -> tuple[str, str, str]:
        shape = self.shape
        return gemm.plan_key(shape.size, shape.depth), str(shape.rows), shape.kind

    @property
    def seconds(self) -> float:
        return _gemm_seconds(self.shape, self.bandwidth)

    def of_fewest(self) -> GemmTask | None:
        rows = max(fewest_rows(self.shape.rows), self.gemm.first_rows)
        return replace(self, shape=replace(self.shape, rows=rows)) if rows < self.shape.rows else None

    def inputs(self) -> tuple[Tensor, ...]:
        weight = self.gemm.weights[0]
        return (torch.randn(self.shape.rows, self.shape.depth, device=weight.device).to(weight.dtype),)

    def run(self, plan: GemmPlan | None, inputs: tuple[Tensor, ...], copy: int = 0) -> Tensor:
        (x,), own, gated = inputs, self.gemm, self.shape.kind == "gated"
        weight = own.weights[copy % len(own.weights)]
        if plan is not None:
            return gemm.run(plan, x, weight, own.bias, own.dtype, gated=gated)
        if own.dtype != x.dtype:
            return torch.mm(x, weight.T, out_dtype=own.dtype)
        result = F.linear(x, weight, own.bias)
        return silu_mul(result, own.dtype) if gated else result

    def reading(self, plan: GemmPlan | None) -> float:
        splits = 1 if plan is None else plan.splits
        return _partials_us(splits, self.shape.rows, self.shape.size, self.bandwidth)


@dataclass(frozen=True, slots=True, kw_only=True)
class FP8Task:
    """One GEMM by a weight in FP8 with one number of rows; it is compared with the default plan.

    That of a gated GEMM may split K, and the kernel that reads its partials is a part of the run.
    """

    gemm: ModelFP8Gemm
    shape: FP8Shape
    plans: Sequence[FP8Plan]
    device: DeviceFacts

    @property
    def default(self) -> FP8Plan:
        """What runs without a plan."""
        shape = replace(self.shape, kind="split") if self.shape.kind == "gated" else self.shape
        return fp8_plan.default_plan(shape, self.device.num_sms)

    @property
    def place(self) -> tuple[str, str, str]:
        return self.shape.key, str(self.shape.rows), self.shape.kind

    @property
    def seconds(self) -> float:
        return _fp8_seconds(self.shape, self.device.bandwidth)

    def of_fewest(self) -> None:
        return None

    def inputs(self) -> tuple[Tensor, ...]:
        weight, _ = self.gemm.weights[0]
        return (torch.randn(self.shape.rows, self.shape.depth, device=weight.device).to(torch.bfloat16),)

    def run(self, plan: FP8Plan | None, inputs: tuple[Tensor, ...], copy: int = 0) -> Tensor:
        (x,), own = inputs, self.gemm
        weight, scales = own.weights[copy % len(own.weights)]
        gated = self.shape.kind == "gated"
        if plan is not None:
            return fp8_gemm.run_fp8(plan, x, weight, scales, own.block, own.bias, gated=gated)
        result = fp8_gemm.run_fp8(self.default, x, weight, scales, own.block, own.bias)
        return silu_mul(result, x.dtype) if gated else result

    def reading(self, plan: FP8Plan | None) -> float:
        splits = 1 if self.shape.kind == "gated" else (plan or self.default).splits
        return _partials_us(splits, self.shape.rows, self.shape.size, self.device.bandwidth)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsTask:
    """The experts of a layer with one number of tokens."""

    experts: ModelExperts
    tokens: int
    plans: Sequence[MoEPlan]
    bandwidth: float

    @property
    def place(self) -> tuple[str, str, str]:
        return self.experts.shape.key, str(self.tokens), moe.KIND

    @property
    def seconds(self) -> float:
        return _experts_seconds(self.experts, self.tokens, self.bandwidth)

    def of_fewest(self) -> None:
        return None

    def inputs(self) -> tuple[Tensor, ...]:
        own = self.experts
        device, shape = own.weights[0][0].device, own.shape
        x = torch.randn(self.tokens, shape.hidden, device=device).to(torch.bfloat16)
        logits = torch.randn(self.tokens, shape.num_experts, device=device)
        return x, *route(logits, shape.per_token, renormalise=True, num_unpadded=None)

    def run(self, plan: MoEPlan | None, inputs: tuple[Tensor, ...], copy: int = 0) -> Tensor:
        x, weights, experts = inputs
        own = self.experts
        plan = plan or moe_plan.default_plan(own.shape, self.tokens, is_float32=False)
        return moe.run_experts(x, *own.weights[copy % len(own.weights)], weights, experts, plan)

    def reading(self, plan: MoEPlan | None) -> float:
        return 0.0


def plan_tasks(gemms: Sequence[Planned], known: Plans, device: DeviceFacts) -> list[PlanTask]:
    """Returns what is to be timed, in the order of its share of a step."""
    shares: list[tuple[float, PlanTask]] = []
    plain: dict[GemmShape, ModelGemm] = {}
    in_fp8: dict[FP8Shape, ModelFP8Gemm] = {}
    for own in gemms:
        if isinstance(own, ModelExperts):
            shares += [(task.seconds * len(own.weights), task) for task in _experts_tasks(own, known, device)]
        elif isinstance(own, ModelFP8Gemm):
            if own.weights[0][0].nbytes >= MIN_BYTES:
                for shape in own.shapes():
                    if not _is_known(known, shape.key, shape.rows, shape.kind):
                        in_fp8.setdefault(shape, own)
        elif _is_worth_it(own):
            key = gemm.plan_key(*own.weights[0].shape)
            for plain_shape in own.shapes():
                if not _is_known(known, key, plain_shape.rows, plain_shape.kind):
                    plain.setdefault(plain_shape, own)

    def share(shape: GemmShape) -> float:
        return _gemm_seconds(shape, device.bandwidth) * len(plain[shape].weights)

    def fp8_share(shape: FP8Shape) -> float:
        return _fp8_seconds(shape, device.bandwidth) * len(in_fp8[shape].weights)

    ordered = sorted(plain, key=share, reverse=True)
    for plain_shape, plans in gemm_plan.candidates(ordered, device, gemm.tiles_that_won()).items():
        if plans:
            own = plain[plain_shape]
            task = GemmTask(gemm=own, shape=plain_shape, plans=plans, bandwidth=device.bandwidth)
            shares.append((share(plain_shape), task))
    for shape, found in fp8_plan.candidates(sorted(in_fp8, key=fp8_share, reverse=True), device).items():
        if found:
            fp8_task = FP8Task(gemm=in_fp8[shape], shape=shape, plans=found, device=device)
            shares.append((fp8_share(shape), fp8_task))
    return [task for _, task in sorted(shares, key=lambda each: -each[0])]


def _is_known(known: Plans, key: str, rows: int, kind: str) -> bool:
    return kind in known.get(key, {}).get(str(rows), {})


def _is_worth_it(own: ModelGemm) -> bool:
    """Whether a GEMM may have plans, has none stored, and is large enough."""
    weight = own.weights[0]
    is_large = weight.nbytes >= MIN_BYTES and weight.dtype == torch.bfloat16
    return is_large and not gemm.has_stored_plan(*weight.shape)


def _experts_tasks(own: ModelExperts, known: Plans, device: DeviceFacts) -> Iterator[ExpertsTask]:
    """Yield one task per number of tokens."""
    weight, shape = own.weights[0][0], own.shape
    is_stored = shape.key in stored_plans(moe.TABLE, device)
    if is_stored or weight.nbytes < MIN_BYTES or weight.dtype != torch.bfloat16:
        return
    measured = stored_plans(moe.TABLE, device, any_size=True)
    for tokens in moe_plan.TOKENS:
        plans = moe_plan.candidates(shape, tokens, device, measured)
        if plans and not _is_known(known, shape.key, tokens, moe.KIND):
            yield ExpertsTask(experts=own, tokens=tokens, plans=plans, bandwidth=device.bandwidth)


def _gemm_seconds(shape: GemmShape, bandwidth: float) -> float:
    """Returns about how long a GEMM takes: reading its weight, and with many rows longer."""
    return shape.size * shape.depth * ELEMENT / bandwidth * (1 + shape.rows / 256)


def _fp8_seconds(shape: FP8Shape, bandwidth: float) -> float:
    """Returns about how long a GEMM by a weight in FP8 takes."""
    return shape.size * shape.depth / bandwidth * (1 + shape.rows / 256)


def _partials_us(splits: int, rows: int, size: int, bandwidth: float) -> float:
    """Returns what the reader of split-K partials loses: they are float32, and a whole result is bfloat16."""
    num_bytes = splits * 4 - ELEMENT if splits > 1 else 0
    return num_bytes * rows * size / bandwidth * 1e6


def _experts_seconds(own: ModelExperts, tokens: int, bandwidth: float) -> float:
    """Returns about how long the experts take: reading the chosen ones, and with many tokens longer."""
    shape = own.shape
    used = min(shape.num_experts, tokens * shape.per_token)
    each = 3 * shape.size * shape.hidden * shape.element
    return used * each / bandwidth * (1 + shape.pairs(tokens) / 256)
