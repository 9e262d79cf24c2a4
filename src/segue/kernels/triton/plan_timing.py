"""Finds the plans of a model's GEMMs at the start of an engine: by timing the few that the cost model names.

Every plan is timed as a chain of GEMMs with different weights in one CUDA graph, so that neither launches nor
cached weights flatter it, against the library (cuBLAS) in the same chain. A plan is only taken if its results
are right and it is clearly faster. What the budget leaves no time for stays with the library.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from segue.kernels.gemm_plan import (
    ELEMENT,
    DeviceFacts,
    GemmPlan,
    GemmShape,
    candidates,
    choose_fastest,
    predict,
)
from segue.kernels.model_gemm import ModelGemm
from segue.kernels.plan_store import Plans, merge
from segue.kernels.triton import gemm
from segue.kernels.triton.gate_up_silu import silu_mul
from segue.kernels.triton.launch import device_facts
from segue.logs import logger

MIN_BYTES = 1 << 20  # a smaller weight takes a few microseconds by any plan
BUDGET_S = 10.0
_COMPILING = 0.6  # of the budget: the most that compiling may take
_CHAIN_S = 3e-4  # seconds of a chain: long enough for the device's clock
_MAX_CHAIN = 32  # GEMMs in a chain
_REPLAYS = 5
_MAX_ERROR = 2e-2  # greatest difference from the library's result, relative to the largest element


@dataclass(eq=False, slots=True)
class _Task:
    """One GEMM with one number of rows, and the plans to try."""

    gemm: ModelGemm
    shape: GemmShape
    plans: list[GemmPlan]
    kernels: list[Any] = field(default_factory=list)  # of the plans: Triton's, or futures of them

    def x(self) -> Tensor:
        """Returns random tokens."""
        weight = self.gemm.weights[0]
        return torch.randn(self.shape.rows, self.shape.depth, device=weight.device, dtype=weight.dtype)

    def arguments(self, x: Tensor, copy: int = 0) -> tuple[Any, ...]:
        """Returns the arguments of `gemm.run` behind the plan, with the weight of one layer."""
        own = self.gemm
        return x, own.weights[copy % len(own.weights)], own.bias, own.dtype

    def run(self, plan: GemmPlan, x: Tensor, copy: int = 0) -> Tensor:
        """Run the GEMM with a plan."""
        return gemm.run(plan, *self.arguments(x, copy), gated=self.shape.kind == "gated")

    def run_library(self, x: Tensor, copy: int = 0) -> Tensor:
        """Run the GEMM as it runs without a plan."""
        _, weight, bias, dtype = self.arguments(x, copy)
        if dtype != x.dtype:
            return torch.mm(x, weight.T, out_dtype=dtype)
        result = F.linear(x, weight, bias)
        return silu_mul(result, dtype) if self.shape.kind == "gated" else result


@torch.inference_mode()
def find_plans(
    gemms: Sequence[ModelGemm], known: Plans, budget_s: float = BUDGET_S
) -> tuple[Plans, Plans, str]:
    """Find the plans of a model's GEMMs that neither the stored table nor `known` has.

    Must be called on the thread and the stream that run steps.

    Returns:
        The plans to use; those of them to keep for later starts, which is all but those whose candidates
        could not all be compiled in time; and one line about what was done.
    """
    began, device = time.monotonic(), device_facts()
    tasks = plan_tasks(gemms, known, device)
    if not tasks:
        return {}, {}, "all are stored or cached"
    _compile(tasks, began + budget_s * _COMPILING)
    compiled = time.monotonic()
    found: Plans = {}
    kept: Plans = {}
    timer = ChainTimer()
    timed = taken = 0
    for task in tasks:
        if time.monotonic() - began > budget_s:
            break
        plans = [plan for plan, kernel in zip(task.plans, task.kernels, strict=True) if _is_compiled(kernel)]
        try:
            best = _fastest(task, plans, device, timer)
        except torch.OutOfMemoryError as error:
            logger.warning("no more GEMM plans are timed, cuBLAS computes the other shapes: %s", error)
            break
        entry: Plans = {
            gemm.plan_key(task.shape.size, task.shape.depth): {
                str(task.shape.rows): {task.shape.kind: asdict(best) if best else None}
            }
        }
        found = merge(found, entry)
        if not any(map(_is_late, task.kernels)):
            kept = merge(kept, entry)
        timed, taken = timed + 1, taken + (best is not None)
    took = f"{time.monotonic() - began:.1f} s, {compiled - began:.1f} of them to compile"
    return found, kept, f"{timed} of {len(tasks)} timed in {took}; in {taken} a plan beats cuBLAS"


def plan_tasks(gemms: Sequence[ModelGemm], known: Plans, device: DeviceFacts) -> list[_Task]:
    """Returns what is to be timed, that which takes most of a step first."""
    pending: dict[GemmShape, ModelGemm] = {}
    for own in gemms:
        weight = own.weights[0]
        size, depth = weight.shape
        if weight.nbytes < MIN_BYTES or weight.dtype != torch.bfloat16 or gemm.has_stored_plan(size, depth):
            continue
        for shape in own.shapes():
            if shape.kind not in known.get(gemm.plan_key(size, depth), {}).get(str(shape.rows), {}):
                pending.setdefault(shape, own)

    def share_of_a_step(shape: GemmShape) -> float:
        """Returns the seconds of all layers, about: the cost of reading the weights and of computing."""
        read, computed = shape.size * shape.depth * ELEMENT / device.bandwidth, shape.rows / 256
        return read * (1 + computed) * len(pending[shape].weights)

    ordered = sorted(pending, key=share_of_a_step, reverse=True)
    found = candidates(ordered, device, gemm.tiles_that_won())
    return [_Task(pending[shape], shape, plans) for shape, plans in found.items() if plans]


class _TooLateError(Exception):
    """A kernel was not compiled, because its turn came after the deadline."""


class _UntilDeadline(Executor):
    """Runs work in threads; what begins after the deadline fails instead."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        threads = max(1, min(16, len(os.sched_getaffinity(0))))
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="segue-compile")

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See `concurrent.futures.Executor.submit`."""

        def run() -> Any:
            if time.monotonic() > self._deadline:
                raise _TooLateError
            return work(*args, **kwargs)

        return self._threads.submit(run)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See `concurrent.futures.Executor.shutdown`."""
        self._threads.shutdown(wait, cancel_futures=cancel_futures)


def _compile(tasks: Sequence[_Task], deadline: float) -> None:
    """Compile the kernels of all candidates in threads; none begins after the deadline."""
    with _UntilDeadline(deadline) as executor, triton.AsyncCompileMode(executor, ignore_errors=True):
        for task in tasks:
            x, gated = task.x(), task.shape.kind == "gated"
            task.kernels = [gemm.compile_plan(plan, *task.arguments(x), gated=gated) for plan in task.plans]


def _is_compiled(kernel: Any) -> bool:
    """Whether a kernel was compiled, now or earlier."""
    return not isinstance(kernel, triton.FutureKernel) or kernel.kernel is not None


def _is_late(kernel: Any) -> bool:
    """Whether there was no time to compile a kernel."""
    return isinstance(kernel, triton.FutureKernel) and isinstance(kernel.future.exception(), _TooLateError)


def _fastest(
    task: _Task, plans: Sequence[GemmPlan], device: DeviceFacts, timer: ChainTimer
) -> GemmPlan | None:
    """Returns the fastest of some plans, or None if the library is as fast."""
    x = task.x()
    expected = task.run_library(x)
    copies = int(min(_MAX_CHAIN, max(8, _CHAIN_S / predict(task.plans[0], task.shape, device))))
    library = timer(partial(task.run_library, x), copies)
    reads = 4 / device.bandwidth * 1e6  # microseconds to write or read an element of split-K partials
    times = {}
    for plan in plans:
        try:
            if (error := _error(task.run(plan, x), expected)) > _MAX_ERROR:
                logger.warning("a GEMM plan gives wrong results (%.3g): %s for %s", error, plan, task.shape)
                continue
            reading = (
                (plan.splits - 0.5) * task.shape.rows * task.shape.size * reads if plan.splits > 1 else 0.0
            )
            times[plan] = reading + timer(partial(task.run, plan, x), copies)
        except triton.runtime.errors.OutOfResources as error:
            logger.debug("%s for %s: %s", plan, task.shape, error)
    return choose_fastest(times, library)


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
