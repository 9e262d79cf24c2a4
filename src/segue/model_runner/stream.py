"""The queue that steps run in, one after the other: a thread for a CPU, a stream for a CUDA device."""

from __future__ import annotations

import gc
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")


class ComputeStream(ABC):
    """Runs submitted work in order.

    After one piece of work has failed, all later work fails with the same error: its input is missing.
    """

    _failure: BaseException | None = None

    @abstractmethod
    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Queue `work`; the future is done when `work` has run, or on CUDA when it has been launched."""

    @abstractmethod
    def close(self) -> None:
        """Finish all submitted work; no more may be submitted afterwards."""

    def _run(self, work: Callable[[], Result]) -> Result:
        if self._failure is not None:
            raise self._failure
        try:
            return work()
        except BaseException as failure:
            self._failure = failure
            raise


class CPUStream(ComputeStream):
    """Runs work on one thread."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="segue-stream")

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        return self._executor.submit(self._run, work)

    def close(self) -> None:
        self._executor.shutdown(wait=True)


class CUDAStream(ComputeStream):
    """A compute stream of one device; work is launched on the thread that submits it."""

    def __init__(self, device: torch.device) -> None:
        # High priority, because its kernels go first, and because torch reuses streams: code that asks for a
        # stream of the default priority never gets this one.
        self._stream = torch.Stream(device, priority=-1)
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        done: Future[Result] = Future()
        with self._lock, self._stream:
            try:
                done.set_result(self._run(work))
            except Exception as failure:
                done.set_exception(failure)
        return done

    def close(self) -> None:
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
