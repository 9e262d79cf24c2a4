"""Finds the plans of a model's GEMMs and experts at the start of an engine, by timing a few candidates.

Every plan is timed as a chain of GEMMs with different weights in one CUDA graph, so that neither launches nor
cached weights flatter it, against what runs without a plan in the same chain: cuBLAS, or for experts and
weights in FP8 a plan that runs on any device. A plan is only taken if its results are right and it is clearly
faster, with the most rows that it serves, and beside cuBLAS with the fewest: cuBLAS has tiles for every 8
rows, and ours are padded to a power of two. What the budget leaves no time for goes without a plan.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from segue.kernels import compilations
from segue.kernels.gemm_plan import choose_fastest
from segue.kernels.launching import Launch, launched_by
from segue.kernels.model_gemm import Planned
from segue.kernels.plan_store import PlanCache, Plans, add_found_plans, merge
from segue.kernels.triton import fp8_gemm, gemm, moe
from segue.kernels.triton.launch import device_facts
from segue.kernels.triton.plan_tasks import PlanTask, plan_tasks
from segue.logs import logger

BUDGET_S = 10.0
_COMPILING = 0.6  # of the budget: the most that compiling may take
_CHAIN_S = 3e-4  # seconds of a chain: long enough for the device's clock
_MAX_CHAIN = 32  # runs in a chain
_REPLAYS = 5
_MAX_ERROR = 2e-2  # greatest difference from the result without a plan, relative to the largest element


@torch.inference_mode()
def find_plans(gemms: Sequence[Planned], cache: PlanCache, budget_s: float = BUDGET_S) -> tuple[Plans, str]:
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
    fp8_gemm.choose_fp8.cache_clear()
    moe.choose.cache_clear()


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


def _compile(tasks: Sequence[PlanTask], deadline: float) -> list[list[list[Any]]]:
    """Compile the kernels of all candidates, several at a time; none begins after the deadline.

    The first candidates of all tasks come before the second ones: so at the deadline every task has some.

    Returns the kernels of each plan of each task, which are Triton's, or futures of them that are done.
    """
    inputs = [task.inputs() for task in tasks]
    kernels: list[list[list[Any]]] = [[] for _ in tasks]
    with _UntilDeadline(deadline) as executor, triton.AsyncCompileMode(executor, ignore_errors=True):
        for task, given in zip(tasks, inputs, strict=True):
            _kernels(task, None, given)
        for number in range(max(len(task.plans) for task in tasks)):
            for task, given, own in zip(tasks, inputs, kernels, strict=True):
                own += [_kernels(task, plan, given) for plan in task.plans[number : number + 1]]
    return kernels


def _kernels(task: PlanTask, plan: Any, inputs: tuple[Tensor, ...]) -> list[Any]:
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


def _fastest(task: PlanTask, plans: Sequence[Any], timer: ChainTimer) -> Any | None:
    """Returns the fastest of some plans, or None if what runs without a plan is as fast.

    A plan that is faster for the most rows that it serves has to be so for the fewest, too.
    """
    best = _fastest_of(task, plans, timer)
    fewest = None if best is None else task.of_fewest()
    return best if fewest is None else _fastest_of(fewest, [best], timer)


def _fastest_of(task: PlanTask, plans: Sequence[Any], timer: ChainTimer) -> Any | None:
    """Returns the fastest of some plans for the rows of the task alone; None as `_fastest`."""
    inputs = task.inputs()
    expected = task.run(None, inputs)
    copies = int(min(_MAX_CHAIN, max(4, _CHAIN_S / task.seconds)))
    without = task.reading(None) + timer(partial(task.run, None, inputs), copies)
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
    whole, expected = (each.sum(0) if each.dim() == 3 else each.float() for each in (result, expected))
    worst = (whole - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
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
