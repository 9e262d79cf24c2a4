"""Takes the place of Triton's launches for a while, as one owner at a time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

Launch = Callable[..., Any]  # as `JITFunction.run`
_KNOWN = "3.6."  # the version of Triton whose launches are known
_one_at_a_time = threading.Lock()  # engines of one process that start at the same time


@contextmanager
def launched_by(make: Callable[[Launch], Launch]) -> Iterator[None]:
    """Have all launches of this process made by what `make` returns for Triton's own launch."""
    from triton.runtime.jit import JITFunction

    with _one_at_a_time:
        launch = JITFunction.run
        JITFunction.run = make(launch)
        try:
            yield
        finally:
            JITFunction.run = launch


@contextmanager
def lean_launches() -> Iterator[None]:
    """Launch this thread's kernels in half of the time, on its current stream, while the block runs.

    A capture launches ten thousands of them. What is left out of a launch: hooks, if there are none; the
    look-up of the device, the stream and settings, which do not change; the check that constants of modules
    have not changed. Another version of Triton launches as ever.
    """
    if not _is_known():
        yield
        return
    from triton import knobs

    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if any(hook is not None and hook.calls for hook in hooks):
        yield
        return
    with launched_by(_lean):
        yield


def _lean(launch: Launch) -> Launch:
    """Return the lean launch; threads other than this one launch as ever."""
    from triton.runtime import driver

    find, own = kernel_finder(), threading.get_ident()

    @cache
    def current_stream() -> Any:
        return driver.active.get_current_stream(driver.active.get_current_device())

    def run(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if warmup or function.pre_run_hooks or threading.get_ident() != own:
            return launch(function, *args, grid=grid, warmup=warmup, **options)
        kernel, bound = find(function, args, options)
        if kernel is None or kernel.__class__.__name__ == "FutureKernel":
            return launch(function, *args, grid=grid, warmup=warmup, **options)
        x, y, z = (*(grid(bound) if callable(grid) else grid), 1, 1)[:3]
        stream, values = current_stream(), bound.values()
        kernel.run(x, y, z, stream, kernel.function, kernel.packed_metadata, None, None, None, *values)
        return kernel

    return run


def kernel_finder() -> Callable[[Any, tuple[Any, ...], dict[str, Any]], tuple[Any, dict[str, Any]]]:
    """Return what finds the kernel of a launch, by function, arguments and options, without making one.

    It is for the current device, and for a time in which no setting of Triton changes. It returns the kernel,
    or the future of one, or None if no launch has made one yet; and the arguments by name. With another
    version of Triton it finds none.
    """
    from triton import knobs
    from triton.runtime import driver

    if not _is_known():
        return lambda function, args, options: (None, {})
    current_device = cache(lambda: driver.active.get_current_device())
    debug, mode = knobs.runtime.debug, knobs.compilation.instrumentation_mode

    def find(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        kernels, keys, _, _, bind = function.device_caches[current_device()]
        settings = {"debug": options.get("debug", function.debug) or debug, "instrumentation_mode": mode}
        bound, specialization, packed = bind(*args, **{**options, **settings})
        return kernels.get(keys.get((tuple(specialization), str(packed)))), bound

    return find


def _is_known() -> bool:
    """Whether Triton is there, in the version whose launches are known."""
    triton: Any = sys.modules.get("triton")  # without it, there are no kernels
    return getattr(triton, "__version__", "").startswith(_KNOWN)
