"""The one place that takes memory which stays: one function per kind. Most return bytes, `uint8`.

Memory that other processes map comes from `shared.py`.
Temporaries of a step and small tensors that one module keeps for itself are torch's, and not taken here.
"""

from __future__ import annotations

import mmap
import resource
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from segue.logs import logger


def pageable(num_bytes: int, *, huge: bool = False) -> Tensor:
    """Return page-aligned zeros of the host; the memory goes back to the system with the tensor.

    Pages cost nothing until they are touched. Memory of malloc may stay with the process when it is freed.
    With `huge` they are huge pages, where the kernel has them.
    """
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    # Private: kernels rarely give huge pages to shared memory, and a fork must not write to it.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the kernel may have been built without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def zeros(num_bytes: int, device: torch.device) -> Tensor:
    """Return zeros for a KV cache: of a CUDA device, or of the host in huge pages.

    `torch.zeros` would touch all memory of the host at once, which takes seconds for a KV cache.
    """
    return pageable(num_bytes, huge=True) if device.type == "cpu" else on_device(num_bytes, device).zero_()


def pinned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an undefined tensor of the host for copies from and to `device`: pinned if that is CUDA.

    Pinned memory is torch's, which rounds sizes up to powers of two and keeps what is freed for later.
    """
    return torch.empty(*shape, dtype=dtype, pin_memory=device.type == "cuda" and 0 not in shape)


def page_locked(num_bytes: int) -> Tensor:
    """Return pinned zeros of exactly this size, for gigabytes; call `unlock` before they are freed.

    Where the driver refuses to pin them, they are pageable.
    """
    raw = pageable(num_bytes)
    if num_bytes:
        lock(raw.zero_(), "copies from it to the GPU take longer")
    return raw


def lock(touched: Tensor, loss: str) -> bool:
    """Make memory of the host pinned; call `unlock` before it is freed.

    Its pages must have been touched, else they come into being under the driver's lock.

    Returns False, and warns of the ``loss``, if the driver refuses to, as it may in containers.
    """
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    try:
        torch.cuda.check_error(cudart.cudaHostRegister(touched.data_ptr(), touched.nbytes, 0))
    except RuntimeError as error:
        with suppress(RuntimeError):  # the next launch is told of the error, too
            torch.zeros(1, device="cuda")
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        logger.warning(
            "%d bytes of host memory cannot be pinned for the GPU (%s; a process may lock %s bytes): %s. "
            "Raise the limit by `ulimit -l unlimited`, or by `--ulimit memlock=-1` of a container",
            touched.nbytes,
            error,
            "any number of" if limit == resource.RLIM_INFINITY else limit,
            loss,
        )
        return False
    return True


def unlock(locked: Tensor) -> None:
    """Make the memory of `page_locked` or `lock` pageable, so that it can be freed."""
    if locked.numel() and locked.is_pinned():
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(cudart.cudaHostUnregister(locked.data_ptr()))


def on_device(num_bytes: int, device: torch.device) -> Tensor:
    """Return undefined bytes of a CUDA device, from torch's allocator, on the current stream."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def registered(num_bytes: int, pool: torch.cuda.MemPool) -> Tensor:
    """Return undefined bytes of the current CUDA device from `pool`, whose memory NCCL can register."""
    with torch.cuda.use_mem_pool(pool):
        return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a tensor: on a CPU in the same memory, on CUDA as an asynchronous copy."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
