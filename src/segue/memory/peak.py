"""Measures the peak memory of a piece of work."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from segue.host import read_number

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc_pid_clear_refs(5): resets the high-water mark to the resident size


class PeakMeter:
    """Measures the bytes taken beyond those at `start`: of CUDA's allocator, or resident ones on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def start(self) -> None:
        """Begin to measure, and forget earlier peaks."""
        if self._device.type == "cpu":
            self._before = _reset_resident_peak()
        else:
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)

    def stop(self) -> int:
        """Return the peak since `start`, in bytes."""
        if self._device.type == "cpu":
            return max(0, _resident_peak() - self._before)
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - self._before


def _reset_resident_peak() -> int:
    """Let the kernel forget the process's peak of resident memory; returns the bytes to compare with.

    These are the bytes resident now, or the highest peak so far if the kernel cannot forget it.
    """
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:  # some sandboxes lack this file
        return _resident_peak()
    return _status("VmRSS") or _resident_peak()


def _resident_peak() -> int:
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _status(name: str) -> int:
    return 1024 * (read_number(_STATUS, name) or 0)
