"""Launch options, with programmatic dependent launch on Hopper and later, and the facts about the device."""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

from segue.kernels.gemm_plan import FEW_ROWS, DeviceFacts

# The PDL mode of a kernel. OFF: the kernel starts when its predecessor has ended. LATE and EARLY: it may
# start before that, and launches its own dependents once its loads are done (LATE) or right after its wait
# (EARLY). EARLY is faster while kernels leave the device almost empty (measured: EARLY takes 0.90 ms and LATE
# 0.95 for a step of one row, 1.65 and 1.58 for a step of 32).
OFF, LATE, EARLY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_UNKNOWN_BANDWIDTH = 2e12  # bytes per second, of a device whose driver does not say it


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait until all earlier kernels are done; work that does not depend on them may precede the wait.

    All kernels but the predecessor are done already: it has waited for them before it launched this one. So
    what they alone have written may be read before the wait, too.
    """
    if PDL != OFF:
        gdc_wait()
    if PDL == EARLY:
        gdc_launch_dependents()


@triton.jit
def pdl_launch_dependents(PDL: tl.constexpr):
    """Let the next kernel start and run up to its own `pdl_wait`."""
    if PDL == LATE:
        gdc_launch_dependents()


@triton.jit
def pdl_launch_behind_loads(PDL: tl.constexpr):
    """Do as `pdl_launch_dependents`, and keep what comes behind from being moved before the loads.

    A second launch, as in EARLY, does nothing else. Before Hopper nothing is kept in its place.
    """
    if PDL != OFF:
        gdc_launch_dependents()


@triton.jit
def loads_stay_first(never, PDL: tl.constexpr):
    """Keep what comes behind from being moved before the loads, and do not let the next kernel start.

    The compiler moves nothing across an instruction that could let it start. `never` does not hold, which the
    compiler must not know: it depends on an argument for which the kernel is not specialised. Before Hopper
    nothing is kept in its place.
    """
    if PDL != OFF:
        if never:
            gdc_launch_dependents()


@cache
def is_hopper() -> bool:
    """Returns whether the device is Hopper or later, which has programmatic dependent launch and TMA."""
    return torch.cuda.get_device_capability() >= (9, 0)


@cache
def device_facts() -> DeviceFacts:
    """Returns what plans depend on, of the current device."""
    index = torch.cuda.current_device()
    found, limits = torch.cuda.get_device_properties(index), driver.active.utils.get_device_properties(index)
    # A transfer per edge of the clock; the memory reads at 0.85 of that (measured on an H200: 4.16 TB/s).
    bandwidth = 0.85 * 2 * limits.get("mem_clock_rate", 0) * 1e3 * limits.get("mem_bus_width", 0) / 8
    return DeviceFacts(
        name=found.name,
        capability=(found.major, found.minor),
        num_sms=found.multi_processor_count,
        shared_bytes=limits["max_shared_mem"],
        memory_bytes=found.total_memory,
        bandwidth=bandwidth or _UNKNOWN_BANDWIDTH,
    )


@cache
def num_sms(device: torch.device) -> int:
    """Returns the number of streaming multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch_options(num_warps: int, rows: int | None) -> dict[str, int | bool]:
    """Returns the launch options that all kernels here take.

    `rows` is the number of tokens of the step; few of them choose EARLY, and None never does. `PDL` is for
    the kernel's code, `launch_pdl` for Triton's launcher.
    """
    return {"PDL": _mode(rows).value, "launch_pdl": is_hopper(), "num_warps": num_warps}


def _mode(rows: int | None) -> tl.constexpr:
    """Returns the PDL mode of kernels of a step of so many tokens."""
    if not is_hopper():
        return OFF
    return EARLY if rows is not None and rows <= FEW_ROWS else LATE
