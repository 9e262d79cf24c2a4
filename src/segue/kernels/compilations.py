"""Compiles kernels before they are needed, several at a time, and tells of those that are compiled later.

Triton compiles a kernel for each combination of its arguments' types and constants (a variant) when that is
launched first, which takes half a second or more, and keeps it on disk (`TRITON_CACHE_DIR`). A worker has
processes that compile (`compile_processes.py`), and threads that wait for them and load what they have made.
Without these processes the threads compile, and mostly wait for Python's lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import getclosurevars
from typing import Any

import torch
from torch import Tensor

from segue.errors import OutOfMemoryError
from segue.host import free_cpu_memory, usable_cores
from segue.kernels.compile_processes import CompileProcesses, can_compile, missing_variant
from segue.kernels.launching import Launch, kernel_finder, launched_by
from segue.logs import logger

_listeners: list[Callable[..., None]] = []  # of all engines of this process
_processes: CompileProcesses | None = None  # of this process, while it starts
_compiled_there = threading.local()  # `value`: whether they have compiled what this thread loads
_MAX_THREADS = 16  # each may take 100 MB, and the slowest kernel takes as long as these need for a hundred
_PROCESS_BYTES = 512 << 20  # a process may take so much beside what it shares with the worker
_UNDEFINED = ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty"))


@dataclass(slots=True)
class Compilations:
    """Counts kernels that were compiled, and those that were loaded from Triton's cache on disk."""

    compiled: int = 0
    loaded: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def note(self, *, is_loaded: bool) -> None:
        """Count one more kernel; any thread may call it."""
        with self._lock:
            self.loaded += is_loaded
            self.compiled += not is_loaded


def start_processes(num_ranks: int) -> None:
    """Fork processes that compile kernels, if this machine has a GPU; see `CompileProcesses.fork` for when.

    `num_ranks` processes share the cores and the memory of this machine.
    """
    global _processes
    if not can_compile():
        return
    try:
        count = min(_num_compilers(num_ranks), free_cpu_memory() // (num_ranks * _PROCESS_BYTES))
        if count > 1:  # one alone would be no faster than the threads
            _processes = CompileProcesses.fork(count)
    except (OutOfMemoryError, OSError) as error:
        logger.debug("threads compile kernels, as there are no processes for it: %s", error)


def end_processes() -> None:
    """End the processes that compile kernels, if there are any: all kernels are there."""
    global _processes
    processes, _processes = _processes, None
    if processes is not None:
        processes.close()


def _num_compilers(num_ranks: int) -> int:
    return min(_MAX_THREADS, max(1, usable_cores() // num_ranks))


@contextmanager
def compiled_together(
    device: torch.device, num_ranks: int = 1, on_kernels: Callable[[int, int], None] | None = None
) -> Iterator[Compilations]:
    """Compile the kernels that the block launches on this thread, and launch none of them.

    When the block has ended, they are all compiled and loaded, and what they would have launched can be
    launched at once. In the block other operators run, and read zeros where a kernel would have written.
    `num_ranks` processes share the cores of this machine. `on_kernels` is called on this thread with the
    number of kernels that are there, and of all.

    Yields the numbers of kernels, which are complete when the block has ended.
    """
    from triton import AsyncCompileMode

    found, own = Compilations(), threading.get_ident()

    def compile_only(launch: Launch) -> Launch:
        find = kernel_finder()

        def run(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            """Take the place of a launch; other threads launch as ever."""
            if threading.get_ident() != own:
                return launch(function, *args, grid=grid, warmup=warmup, **options)
            kernel, _ = find(function, args, options)  # of 30 launches that name kernels, 29 name a known one
            if kernel is None:
                kernel = launch(function, *args, grid=grid, warmup=True, **options)
            return kernel

        return run

    def note(cache_hit: bool, **_: Any) -> None:
        found.note(is_loaded=cache_hit and not getattr(_compiled_there, "value", False))

    began = time.monotonic()
    with (
        launched_by(compile_only),
        listening(note),
        _Compilers(_num_compilers(num_ranks), "segue-compile", partial(_use, device)) as compilers,
        AsyncCompileMode(compilers) as mode,
    ):
        mode.submit = partial(_submit_once, mode.submit)
        with _zeros():
            yield found
        named = time.monotonic()
        for done, _ in enumerate(as_completed(mode.raw_futures), 1):
            if on_kernels is not None:
                on_kernels(done, len(mode.raw_futures))
    text = "%d kernels were compiled and %d loaded: named in %.2f s, then waited for %.2f s"
    logger.debug(text, found.compiled, found.loaded, named - began, time.monotonic() - named)


@contextmanager
def listening(listener: Callable[..., None]) -> Iterator[None]:
    """Have Triton call `listener` with each kernel that any thread compiles or loads, while the block runs.

    Its arguments are those of Triton's `CompilationListener`.
    """
    from triton import knobs

    _listeners.append(listener)
    knobs.compilation.listener = _tell
    try:
        yield
    finally:
        _listeners.remove(listener)


def _tell(**kernel: Any) -> None:
    for listener in [*_listeners]:
        listener(**kernel)


@contextmanager
def watched(device: torch.device, on_change: Callable[[Compilations], None]) -> Iterator[None]:
    """Warn of each kernel that is compiled while the block runs, as requests wait for it; none is on a CPU.

    `on_change` is called with the numbers so far, on the thread that launches the kernel.
    """
    if device.type == "cpu":
        yield
        return
    found = Compilations()

    def note(src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        found.note(is_loaded=cache_hit)
        on_change(found)
        logger.warning(
            "the kernel %s was %s after the start, which took %.2f s: a step waited for it. Please report "
            "this variant: %s",
            src.fn.__name__,
            "loaded from the cache on disk" if cache_hit else "compiled",
            times.total / 1e6,
            describe(src),
        )

    with listening(note):
        yield


def describe(src: Any) -> str:
    """Return the arguments of a variant: types, which numbers 16 divides, and the values of constants.

    `src` is Triton's `ASTSource`: its tables have the places of arguments, as tuples, for keys.
    """
    parts = []
    for index, (name, kind) in enumerate(src.signature.items()):
        constant = src.constants.get((index,))
        divides = ", divisible by 16" if (index,) in src.attrs else ""
        parts.append(f"{name}: {kind if kind != 'constexpr' else repr(constant)}{divides}")
    return "; ".join(parts)


class _Compilers(ThreadPoolExecutor):
    """Threads that compile kernels, build what launches them, and load them to the device."""

    def __init__(self, num_threads: int, name: str, use_device: Callable[[], None]) -> None:
        super().__init__(num_threads, name, use_device)

    def submit(self, compile: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        """Queue what Triton wants to be called in order to compile one kernel."""
        return super().submit(_load, compile)


def _submit_once(submit: Callable[..., Any], key: Any, compile: Any, finalize: Any, *others: Any) -> Any:
    """Queue a kernel, and have further launches find it, which would be made ready for the compiler again.

    Triton does the latter itself from version 3.7 on, and gives `others` from 3.9 on.
    """
    kernel, known = submit(key, compile, finalize, *others), getclosurevars(finalize).nonlocals
    if "kernel_cache" in known:
        known["kernel_cache"].setdefault(known["key"], kernel)
    return kernel


def most_at_once() -> int:
    """Return how many threads should call :func:`compiled`: with more, kernels would wait for a process."""
    return _num_compilers(1) if _processes is None else _processes.count


def compiled(compile: Callable[[], Any]) -> Any:
    """Return what Triton's `compile` returns, which a process has compiled if there are any for it."""
    processes = _processes
    if processes is not None:
        job = missing_variant(compile)
        _compiled_there.value = job is not None and processes.compile(job)
    return compile()


def _load(compile: Callable[[], Any]) -> Any:
    kernel = compiled(compile)
    kernel._init_handles()  # as the first launch does, which would take as long again where a launcher is new
    return kernel


def _use(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)


@contextmanager
def _zeros() -> Iterator[None]:
    """Make this thread's new tensors zeros where they would be undefined: no kernel writes their indices.

    The functions of torch that make them are replaced meanwhile. A `TorchFunctionMode` would do the same, but
    Python asks it about each attribute of a tensor, too: 78,000 times in the warm-up of Qwen3-0.6B.
    """
    own = threading.get_ident()

    def cleared(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **options: Any) -> Tensor:
            tensor = make(*args, **options)
            return tensor.zero_() if threading.get_ident() == own else tensor

        return call

    replaced = [(owner, name, vars(owner).get(name)) for owner, name in _UNDEFINED]
    try:
        for owner, name, _ in replaced:
            setattr(owner, name, cleared(getattr(owner, name)))
        yield
    finally:
        for owner, name, make in replaced:
            if make is None:  # it is inherited
                delattr(owner, name)
            else:
                setattr(owner, name, make)
