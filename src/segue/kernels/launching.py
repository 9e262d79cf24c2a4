"""Takes the place of Triton's launches for a while, as one owner at a time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    """Launch kernels in half of the time while the block runs: a capture launches ten thousands of them.

    What is left out of a launch: hooks, if there are none; the look-up of settings that do not change; the
    check that constants of modules have not changed. Another version of Triton launches as ever.
    """
    triton: Any = sys.modules.get("triton")  # without it, there are no kernels
    if not getattr(triton, "__version__", "").startswith(_KNOWN):
        yield
        return
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    if any(hook is not None and hook.calls for hook in hooks):
        yield
        return
    with launched_by(_lean):
        yield


def _lean(launch: Launch) -> Launch:
    from triton import knobs
    from triton.runtime import driver

    debug, mode = knobs.runtime.debug, knobs.compilation.instrumentation_mode

    def run(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if warmup or function.pre_run_hooks:
            return launch(function, *args, grid=grid, warmup=warmup, **options)
        device = driver.active.get_current_device()
        kernels, keys, _, _, bind = function.device_caches[device]
        settings = {"debug": options.get("debug", function.debug) or debug, "instrumentation_mode": mode}
        bound, specialization, packed = bind(*args, **{**options, **settings})
        kernel = kernels.get(keys.get((tuple(specialization), str(packed))))
        if kernel is None or kernel.__class__.__name__ == "FutureKernel":
            return launch(function, *args, grid=grid, warmup=warmup, **options)
        x, y, z = (*(grid(bound) if callable(grid) else grid), 1, 1)[:3]
        stream = driver.active.get_current_stream(device)
        values = bound.values()
        kernel.run(x, y, z, stream, kernel.function, kernel.packed_metadata, None, None, None, *values)
        return kernel

    return run
