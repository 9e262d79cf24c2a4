"""Finds the plans of a model's GEMMs and experts at the start of an engine, by timing a few candidates.

Every plan is timed as a chain of GEMMs with different weights in one CUDA graph, so that neither launches nor
cached weights flatter it, against what runs without a plan in the same chain: cuBLAS, or for experts a plan
that runs on any device. A plan is only taken if its results are right and it is clearly faster, with the most
rows that it serves and with the fewest: cuBLAS has tiles for every 8 rows, and ours are padded to a power of
two. What the budget leaves no time for goes without a plan.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from segue.kernels import compilations, gemm_plan, moe_plan
from segue.kernels.gemm_plan import (
    ELEMENT,
    DeviceFacts,
    GemmPlan,
    GemmShape,
    choose_fastest,
    fewest_rows,
)
from segue.kernels.launching import Launch, launched_by
from segue.kernels.model_gemm import ModelExperts, ModelGemm
from segue.kernels.moe_plan import MoEPlan
from segue.kernels.plan_store import PlanCache, Plans, add_found_plans, merge, stored_plans
from segue.kernels.triton import gemm, moe
from segue.kernels.triton.gate_up_silu import silu_mul
from segue.kernels.triton.launch import device_facts
from segue.kernels.triton.moe_routing import route
from segue.logs import logger

MIN_BYTES = 1 << 20  # a smaller weight takes a few microseconds by any plan
BUDGET_S = 10.0
_COMPILING = 0.6  # of the budget: the most that compiling may take
_CHAIN_S = 3e-4  # seconds of a chain: long enough for the device's clock
_MAX_CHAIN = 32  # runs in a chain
_REPLAYS = 5
_MAX_ERROR = 2e-2  # greatest difference from the result without a plan, relative to the largest element


class _Task(Protocol):
    """What is to be timed: one GEMM, or the experts of a layer, for one number of rows."""

    @property
    def plans(self) -> Sequence[Any]:
        """What to try."""

    @property
    def compared(self) -> Sequence[Any]:
        """The plan of ours that the candidates are compared with; none: they are compared with cuBLAS."""

    @property
    def place(self) -> tuple[str, str, str]:
        """Key, number of rows and kind of its plan in tables."""

    @property
    def seconds(self) -> float:
        """Roughly how long one run takes."""

    def of_fewest(self) -> _Task | None:
        """Returns the same task with the fewest rows that its plan serves; None if that is not timed."""

    def inputs(self) -> tuple[Tensor, ...]:
        """Returns random inputs."""

    def run(self, plan: Any, inputs: tuple[Tensor, ...], copy: int = 0) -> Tensor:
        """Run it with a plan, and the weights of one layer; None: what the plans are compared with."""

    def reading(self, plan: Any) -> float:
        """Returns the microseconds that the reader of the result loses by this plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTask:
    """One GEMM with one number of rows."""

    gemm: ModelGemm
    shape: GemmShape
    plans: Sequence[GemmPlan]
    bandwidth: float
    compared: Sequence[GemmPlan] = ()

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

    def reading(self, plan: GemmPlan) -> float:
        """Split-K partials are written and read as float32, and a whole result as bfloat16."""
        num_bytes = plan.splits * 4 - ELEMENT if plan.splits > 1 else 0
        return num_bytes * self.shape.rows * self.shape.size / self.bandwidth * 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExpertsTask:
    """The experts of a layer with one number of tokens."""

    experts: ModelExperts
    tokens: int
    plans: Sequence[MoEPlan]
    bandwidth: float

    @property
    def compared(self) -> Sequence[MoEPlan]:
        return [moe_plan.default_plan(self.experts.shape, self.tokens, is_float32=False)]

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
        plan = plan or self.compared[0]
        return moe.run_experts(x, *own.weights[copy % len(own.weights)], weights, experts, plan)

    def reading(self, plan: MoEPlan) -> float:
        return 0.0


@torch.inference_mode()
def find_plans(
    gemms: Sequence[ModelGemm | ModelExperts], cache: PlanCache, budget_s: float = BUDGET_S
) -> tuple[Plans, str]:
    """Find the plans of a model that no stored table has, in the cache or by timing them.

    Those that are found are added to the cache, except where not all candidates could be compiled in time.
    Must be called on the thread and the stream that run steps.

    Returns:
        The plans, those of the cache included, and one line about what was done.
    """
    began, device = time.monotonic(), device_facts()
    cached = cache.load()
    tasks = plan_tasks(gemms, cached, device)
    if not tasks:
        return cached, "all are stored or cached"
    try:
        kernels = _compile(tasks, began + budget_s * _COMPILING)
    except torch.OutOfMemoryError as error:
        logger.warning("no plans are timed, the GEMMs go without: %s", error)
        return cached, "no memory to time any"
    compiled = time.monotonic()
    found: Plans = {}
    kept: Plans = {}
    timer = ChainTimer()
    timed = taken = 0
    for task, needed in zip(tasks, kernels, strict=True):
        if time.monotonic() - began > budget_s:
            break
        ready = [plan for plan, own in zip(task.plans, needed, strict=True) if all(map(_is_compiled, own))]
        try:
            best = _fastest(task, ready, timer)
        except torch.OutOfMemoryError as error:
            logger.warning("no more plans are timed, the other GEMMs go without: %s", error)
            break
        key, rows, kind = task.place
        entry: Plans = {key: {rows: {kind: asdict(best) if best else None}}}
        found = merge(found, entry)
        if not any(_is_late(kernel) for own in needed for kernel in own):
            kept = merge(kept, entry)
        timed, taken = timed + 1, taken + (best is not None)
    took = f"{time.monotonic() - began:.1f} s, {compiled - began:.1f} of them to compile"
    if kept:
        cache.add(kept)
    return merge(
        cached, found
    ), f"{timed} of {len(tasks)} timed in {took}; {taken} have a plan that is faster"


def use_plans(plans: Plans) -> None:
    """Let the kernels use these plans, too, for shapes that the stored tables do not have."""
    add_found_plans(plans)
    gemm.choose.cache_clear()
    moe.choose.cache_clear()


def plan_tasks(gemms: Sequence[ModelGemm | ModelExperts], known: Plans, device: DeviceFacts) -> list[_Task]:
    """Returns what is to be timed, in the order of its share of a step."""
    shares: list[tuple[float, _Task]] = []
    for own in gemms:
        if isinstance(own, ModelExperts):
            shares += [(task.seconds * len(own.weights), task) for task in _experts_tasks(own, known, device)]
    pending: dict[GemmShape, ModelGemm] = {}
    for own in gemms:
        if isinstance(own, ModelGemm) and _is_worth_it(own):
            key = gemm.plan_key(*own.weights[0].shape)
            for shape in own.shapes():
                if shape.kind not in known.get(key, {}).get(str(shape.rows), {}):
                    pending.setdefault(shape, own)

    def share(shape: GemmShape) -> float:
        return _gemm_seconds(shape, device.bandwidth) * len(pending[shape].weights)

    ordered = sorted(pending, key=share, reverse=True)
    for shape, plans in gemm_plan.candidates(ordered, device, gemm.tiles_that_won()).items():
        if plans:
            own = pending[shape]
            task = GemmTask(gemm=own, shape=shape, plans=plans, bandwidth=device.bandwidth)
            shares.append((share(shape), task))
    return [task for _, task in sorted(shares, key=lambda each: -each[0])]


def _is_worth_it(own: ModelGemm) -> bool:
    """Whether a GEMM may have plans, has none stored, and is large enough."""
    weight = own.weights[0]
    is_large = weight.nbytes >= MIN_BYTES and weight.dtype == torch.bfloat16
    return is_large and not gemm.has_stored_plan(*weight.shape)


def _experts_tasks(own: ModelExperts, known: Plans, device: DeviceFacts) -> Iterator[_ExpertsTask]:
    """Yield one task per number of tokens."""
    weight, shape = own.weights[0][0], own.shape
    is_stored = shape.key in stored_plans(moe.TABLE, device)
    if is_stored or weight.nbytes < MIN_BYTES or weight.dtype != torch.bfloat16:
        return
    measured = stored_plans(moe.TABLE, device, any_size=True)
    for tokens in moe_plan.TOKENS:
        plans = moe_plan.candidates(shape, tokens, device, measured)
        if plans and moe.KIND not in known.get(shape.key, {}).get(str(tokens), {}):
            yield _ExpertsTask(experts=own, tokens=tokens, plans=plans, bandwidth=device.bandwidth)


def _gemm_seconds(shape: GemmShape, bandwidth: float) -> float:
    """Returns about how long a GEMM takes: reading its weight, and with many rows longer."""
    return shape.size * shape.depth * ELEMENT / bandwidth * (1 + shape.rows / 256)


def _experts_seconds(own: ModelExperts, tokens: int, bandwidth: float) -> float:
    """Returns about how long the experts take: reading the chosen ones, and with many tokens longer."""
    shape = own.shape
    used = min(shape.num_experts, tokens * shape.per_token)
    each = 3 * shape.size * shape.hidden * shape.element
    return used * each / bandwidth * (1 + shape.pairs(tokens) / 256)


class _TooLateError(Exception):
    """A kernel was not compiled, because its turn came after the deadline."""


class _UntilDeadline(Executor):
    """Compiles kernels; those whose turn comes after the deadline fail instead."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._threads = ThreadPoolExecutor(compilations.most_at_once(), thread_name_prefix="segue-compile")

    def submit(self, compile: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        """Queue what Triton wants to be called in order to compile one kernel."""

        def run() -> Any:
            if time.monotonic() > self._deadline:
                raise _TooLateError
            return compilations.compiled(compile)

        return self._threads.submit(run)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See `concurrent.futures.Executor.shutdown`."""
        self._threads.shutdown(wait, cancel_futures=cancel_futures)


def _compile(tasks: Sequence[_Task], deadline: float) -> list[list[list[Any]]]:
    """Compile the kernels of all candidates, several at a time; none begins after the deadline.

    The first candidates of all tasks come before the second ones: so at the deadline every task has some.

    Returns the kernels of each plan of each task, which are Triton's, or futures of them that are done.
    """
    inputs = [task.inputs() for task in tasks]
    kernels: list[list[list[Any]]] = [[] for _ in tasks]
    with _UntilDeadline(deadline) as executor, triton.AsyncCompileMode(executor, ignore_errors=True):
        for task, given in zip(tasks, inputs, strict=True):
            for plan in task.compared:
                _kernels(task, plan, given)
        for number in range(max(len(task.plans) for task in tasks)):
            for task, given, own in zip(tasks, inputs, kernels, strict=True):
                own += [_kernels(task, plan, given) for plan in task.plans[number : number + 1]]
    return kernels


def _kernels(task: _Task, plan: Any, inputs: tuple[Tensor, ...]) -> list[Any]:
    """Start to compile the kernels of a plan, and return them; none is launched."""
    kernels, own = [], threading.get_ident()

    def compile_only(launch: Launch) -> Launch:
        def run(function: Any, *args: Any, warmup: bool, **options: Any) -> Any:
            """Take the place of a launch; other threads launch as ever."""
            is_own = threading.get_ident() == own
            kernel = launch(function, *args, warmup=warmup or is_own, **options)
            if is_own:  # the future itself, which Triton's own kernel may forget
                kernels.append(getattr(kernel, "future", None) or kernel)
            return kernel

        return run

    with launched_by(compile_only):
        task.run(plan, inputs)
    return kernels


def _is_compiled(kernel: Any) -> bool:
    """Whether a kernel was compiled, now or earlier."""
    return not isinstance(kernel, Future) or kernel.exception() is None


def _is_late(kernel: Any) -> bool:
    """Whether there was no time to compile a kernel."""
    return isinstance(kernel, Future) and isinstance(kernel.exception(), _TooLateError)


def _fastest(task: _Task, plans: Sequence[Any], timer: ChainTimer) -> Any | None:
    """Returns the fastest of some plans, or None if what runs without a plan is as fast.

    A plan that is faster for the most rows that it serves has to be so for the fewest, too.
    """
    best = _fastest_of(task, plans, timer)
    fewest = None if best is None else task.of_fewest()
    return best if fewest is None else _fastest_of(fewest, [best], timer)


def _fastest_of(task: _Task, plans: Sequence[Any], timer: ChainTimer) -> Any | None:
    """Returns the fastest of some plans for the rows of the task alone; None as `_fastest`."""
    inputs = task.inputs()
    expected = task.run(None, inputs)
    copies = int(min(_MAX_CHAIN, max(4, _CHAIN_S / task.seconds)))
    without = timer(partial(task.run, None, inputs), copies)
    times = {}
    for plan in plans:
        try:
            if (error := _error(task.run(plan, inputs), expected)) > _MAX_ERROR:
                logger.warning("a plan gives wrong results (%.3g): %s for %s", error, plan, task.place)
                continue
            times[plan] = task.reading(plan) + timer(partial(task.run, plan, inputs), copies)
        except torch.OutOfMemoryError:
            raise
        except Exception as failure:  # of Triton or the driver; the engine can do without this plan
            logger.warning("a plan cannot run: %r: %s for %s", failure, plan, task.place)
    return choose_fastest(times, without)


def _error(result: Tensor, expected: Tensor) -> float:
    """Returns the greatest difference, relative to the largest element; infinite with a NaN."""
    whole = result.sum(0) if result.dim() == 3 else result.float()
    worst = (whole - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1e-30)
    return worst.nan_to_num(float("inf")).item()


class ChainTimer:
    """Times a chain of kernels in a CUDA graph. The graphs of one timer share their memory."""

    def __init__(self) -> None:
        current = torch.cuda.current_stream()  # a new one would need a workspace of cuBLAS of its own
        self._stream = torch.cuda.Stream() if current == torch.cuda.default_stream() else current
        self._graph: torch.cuda.CUDAGraph | None = None  # the last one, which keeps the memory pool

    def __call__(self, run: Callable[[int], object], copies: int) -> float:
        """Returns the microseconds of one of `copies` runs, the best of some replays.

        `run(i)` uses copy i of the weights, so that no run finds its weights in the GPU's cache.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run(0)
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(
                pool=self._graph.pool() if self._graph else None, capture_error_mode="thread_local"
            )
            try:
                for copy in range(copies):
                    run(copy)
            finally:
                graph.capture_end()
            self._graph = graph
            best = float("inf")
            for _ in range(_REPLAYS):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                best = min(best, start.elapsed_time(end) / copies * 1e3)
        return best
