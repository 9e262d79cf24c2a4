"""Where steps run, one after the other: a thread on a CPU, the current stream of a CUDA device."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch

Result = TypeVar("Result")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_KEEP_BYTES = 1 << 30


class ComputeStream(Protocol):
    """Runs submitted work in order."""

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Queue `work`; the future is done when it has run, or on CUDA when it has been launched."""
        ...

    def close(self) -> None:
        """Finish what was submitted, then take no more."""
        ...


class CPUStream:
    """One thread. After work that failed, all later work fails with the same error: its input is missing."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="segue-stream")
        self._failure: BaseException | None = None

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Queue `work` for the thread."""
        return self._executor.submit(self._run, work)

    def close(self) -> None:
        """Finish what was submitted, then end the thread."""
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
    """A compute stream of one device; work is launched from the thread that submits it.

    After work that failed, all later work fails with the same error.
    """

    def __init__(self, device: torch.device) -> None:
        # Of high priority: its kernels go first, and torch, which reuses streams, gives it to nobody who asks
        # for one of the usual priority.
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
    """The stream for steps on `device`."""
    return CPUStream() if device.type == "cpu" else CUDAStream(device)


def keep_freed_memory() -> None:
    """Let malloc keep what is freed instead of giving it back to the kernel. Only glibc has this.

    A step's temporaries are freed and taken again at once. By default every one of some MB is unmapped and
    mapped again, and the page faults cost several times what computing on it does (measured: 2.9 ms instead
    of 0.6 ms to sample 16 rows).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES)


def free_garbage() -> None:
    """Give CUDA back what only garbage holds: of a trial run, or of an engine closed in this process.

    Later it might be freed in the middle of a capture.
    """
    gc.collect()
    torch.cuda.empty_cache()
