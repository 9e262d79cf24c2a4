"""The queue that steps run in, one after the other: a thread for a CPU, a stream for a CUDA device."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch

Result = TypeVar("Result")


class ComputeStream(Protocol):
    """Runs submitted work in order."""

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Queue `work`; the future is done when `work` has run, or on CUDA when it has been launched."""
        ...

    def close(self) -> None:
        """Finish all submitted work; no more may be submitted afterwards."""
        ...


class CPUStream:
    """Runs work on one thread.

    After one piece of work has failed, all later work fails with the same error: its input is missing.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="segue-stream")
        self._failure: BaseException | None = None

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Queue `work` for the thread."""
        return self._executor.submit(self._run, work)

    def close(self) -> None:
        """Finish all submitted work, then end the thread."""
        self._executor.shutdown(wait=True)

    def _run(self, work: Callable[[], Result]) -> Result:
        if self._failure is not None:
            raise self._failure
        try:
            return work()
        except BaseException as failure:
            self._failure = failure
            raise


class CUDAStream:
    """A compute stream of one device; work is launched on the thread that submits it.

    After one piece of work has failed, all later work fails with the same error.
    """

    def __init__(self, device: torch.device) -> None:
        # High priority, because its kernels go first, and because torch reuses streams: code that asks for a
        # stream of the default priority never gets this one.
        self._stream = torch.Stream(device, priority=-1)
        self._lock = threading.Lock()
        self._failure: Exception | None = None

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Launch `work` now."""
        done: Future[Result] = Future()
        with self._lock, self._stream:
            try:
                if self._failure is not None:
                    raise self._failure
                done.set_result(work())
            except Exception as failure:
                self._failure = failure
                done.set_exception(failure)
        return done

    def close(self) -> None:
        """Wait until the device is done."""
        self._stream.synchronize()


def make_stream(device: torch.device) -> ComputeStream:
    """Return the stream for steps on `device`."""
    return CPUStream() if device.type == "cpu" else CUDAStream(device)


def free_garbage() -> None:
    """Return memory to CUDA that only garbage holds: of the profile run, or of an engine closed before.

    Later the garbage collector might free it in the middle of a capture.
    """
    gc.collect()
    torch.cuda.empty_cache()
