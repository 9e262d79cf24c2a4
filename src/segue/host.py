"""The machine and this process on it: free memory and cores, malloc, the garbage collector's heap."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
from pathlib import Path

from segue.errors import OutOfMemoryError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_KEEP_BYTES = 1 << 30
_PR_SET_PDEATHSIG = 1  # of prctl(2)


def freeze_heap() -> None:
    """Exclude all objects that exist now from later garbage collections. Called at the end of a start.

    A collection over the 200,000 objects of torch and transformers takes 0.1 s, and delays every stream.
    """
    gc.collect()
    gc.freeze()


def collect_from_now_on() -> None:
    """Turn garbage collection on after imports, and exclude what they made from all later collections.

    The garbage of the imports is kept for ever: it is not collected first. In a worker it is 7,600 objects of
    0.8 MB in all, and to find them takes 0.13 s of CPU time beside the 2.6 s of the imports; in `segue serve`
    it is 0.2 MB, for 0.05 s beside 1.1 s.
    """
    gc.freeze()
    gc.enable()


def keep_freed_memory() -> None:
    """Let malloc keep freed memory instead of returning it to the kernel; does nothing without glibc.

    A step frees its temporaries and the next step allocates them again. By default a temporary of a few MB is
    unmapped and mapped again, and the page faults cost several times as much as the computation (measured:
    2.9 ms instead of 0.6 ms to sample 16 rows).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, whatever this process does then.

    The kernel takes the end of the *thread* that started this process for that of the parent. It kills also a
    process that is stopped, or that hangs in C; a thread that watches the parent would not run there.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def free_cpu_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process can still use: the machine's, or its cgroups' if those are fewer.

    Args:
        root: directory that contains `proc` and `sys`.

    Raises:
        OutOfMemoryError: the kernel does not say how much memory is free.
    """
    available = read_number(root / "proc/meminfo", "MemAvailable")
    if available is None:
        raise OutOfMemoryError(
            "free memory is unknown: /proc/meminfo has no MemAvailable; set --num-kv-tokens on a Linux "
            "system that mounts /proc"
        )
    free = [available * 1024]
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2: one hierarchy for everything
            base = root / "sys/fs/cgroup"
            names = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        free += _free_in_cgroups(base, path, *names)
    return max(0, min(free))


def usable_cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may use at a time, by its affinity and its cgroups' quotas.

    Args:
        root: directory that contains `proc` and `sys`.
    """
    cores = len(os.sched_getaffinity(0))
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2: one hierarchy for everything
            limits = [_words(group / "cpu.max") for group in _groups(root / "sys/fs/cgroup", path)]
        elif "cpu" in controllers.split(","):
            limits = [
                _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
                for group in _groups(root / "sys/fs/cgroup/cpu", path)
            ]
        else:
            continue
        for quota, period in (words for words in limits if len(words) == 2):
            if quota.isdecimal():  # "max" and "-1": no limit
                cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def read_number(file: Path, name: str) -> int | None:
    """Return the number in the line of `file` that begins with `name`; None if there is no such line."""
    for line in _lines(file):
        key, *values = line.split()
        if key.rstrip(":") == name:
            return int(values[0])
    return None


def boot_id(root: Path = Path("/")) -> str:
    """Return what names this start of the machine; "" where the kernel does not tell."""
    return "".join(_lines(root / "proc/sys/kernel/random/boot_id")).strip()


def _free_in_cgroups(base: Path, path: str, limit_name: str, usage_name: str, cache_name: str) -> list[int]:
    """Return the free bytes of a cgroup and of each group above it, up to ``base``, that has a limit.

    ``path`` is the group's, below the mount point ``base``. The names are those of the files with the limit
    and the usage, and of the entry for the file cache, which differ between cgroup versions.
    """
    found = []
    for group in _groups(base, path):
        limit, usage = ("".join(_lines(group / name)[:1]) for name in (limit_name, usage_name))
        if limit.isdecimal() and usage.isdecimal():  # "max": no limit
            # The kernel counts clean file cache as used, but frees it on demand.
            cache = read_number(group / "memory.stat", cache_name) or 0
            found.append(int(limit) - int(usage) + cache)
    return found


def _groups(base: Path, path: str) -> list[Path]:
    """Return a cgroup and each group above it, up to the mount point ``base``.

    The path is as the host sees it. In a container, the container's own group is often mounted at the base.
    So every ancestor that exists counts, and the base always does.
    """
    relative = Path(path.lstrip("/"))
    return [base / relative, *(base / parent for parent in relative.parents)]


def _words(file: Path) -> list[str]:
    """Return the words of a file; none if it cannot be read."""
    return " ".join(_lines(file)).split()


def _lines(file: Path) -> list[str]:
    """Return the lines of a file that are not blank; none if it cannot be read."""
    try:
        return [line for line in file.read_text().splitlines() if line.strip()]
    except OSError:
        return []
