"""Runs a function on several tensor-parallel ranks, a process and a GPU each."""

import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from queue import Empty
from typing import Any

import torch

from segue.distributed.info import TPInfo

# As the frontend's worker_environment has them.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def on_ranks(size: int, work: Callable[..., Any], *args: Any, seconds: float = 100) -> list[Any]:
    """`work(tp, run_dir, *args)` of every rank, by rank, within a deadline."""
    free_memory()
    context = multiprocessing.get_context("spawn")
    found: Any = context.Queue()
    with tempfile.TemporaryDirectory(prefix="segue-") as run_dir:
        processes = [
            context.Process(target=_run, args=(found, TPInfo(rank, size), Path(run_dir), work, args))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(found, size, time.monotonic() + seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()


def free_memory() -> None:
    """Give back what this process has cached: all ranks' devices must have about as much free."""
    gc.collect()
    torch.cuda.empty_cache()


def _collect(found: Any, size: int, deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < size:
        try:
            rank, result, failure = pickle.loads(found.get(timeout=max(0.0, deadline - time.monotonic())))
        except Empty:
            raise AssertionError(f"only ranks {sorted(results)} of {size} came back in time") from None
        assert failure is None, f"rank {rank}: {failure}"
        results[rank] = result
    return [results[rank] for rank in range(size)]


def _run(found: Any, tp: TPInfo, run_dir: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(ENVIRONMENT)
    torch.cuda.set_device(tp.rank)
    answer: tuple[int, Any, str | None]
    try:
        answer = (tp.rank, work(tp, run_dir, *args), None)
    except BaseException:
        answer = (tp.rank, None, traceback.format_exc())
    found.put(pickle.dumps(answer))  # plainly: tensors would be shared with a process that ends
