"""Which NCCL this process uses."""

from __future__ import annotations

import ctypes
import os


def nccl_version() -> tuple[int, int, int] | None:
    """Returns the version of the NCCL that is loaded, as ``(2, 30, 7)``; None if none is.

    `torch.cuda.nccl.version` is the version that torch was compiled with. Another one may be loaded in its
    place, by ``LD_PRELOAD``, and torch then calls that one.
    """
    try:
        nccl = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None
    found = ctypes.c_int()
    if nccl.ncclGetVersion(ctypes.byref(found)) != 0:
        return None
    return found.value // 10000, found.value // 100 % 100, found.value % 100
