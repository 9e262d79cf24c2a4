"""Launch options, with programmatic dependent launch on Hopper and later, and tables of measured plans."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# The PDL mode of a kernel. OFF: the kernel starts when its predecessor has ended. LATE and EARLY: it may
# start before that, and launches its own dependents once its loads are done (LATE) or right after its wait
# (EARLY). EARLY is faster while kernels leave the device almost empty (measured: EARLY takes 0.90 ms and LATE
# 0.95 for a step of one row, 1.65 and 1.58 for a step of 32).
OFF, LATE, EARLY = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FEW_ROWS = 8


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait until all earlier kernels are done; work that does not depend on them may precede the wait."""
    if PDL != OFF:
        gdc_wait()
    if PDL == EARLY:
        gdc_launch_dependents()


@triton.jit
def pdl_launch_dependents(PDL: tl.constexpr):
    """Let the next kernel start and run up to its own `pdl_wait`."""
    if PDL == LATE:
        gdc_launch_dependents()


@cache
def is_hopper() -> bool:
    """Returns whether the device is Hopper or later, which has programmatic dependent launch and TMA."""
    return torch.cuda.get_device_capability() >= (9, 0)


@cache
def num_sms(device: torch.device) -> int:
    """Returns the number of streaming multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch_options(num_warps: int, rows: int | None) -> dict[str, int | bool]:
    """Returns the launch options that all kernels here take.

    `rows` is the number of tokens of the step; few of them choose EARLY, and None never does. `PDL` is for
    the kernel's code, `launch_pdl` for Triton's launcher.
    """
    pdl = is_hopper()
    mode = OFF if not pdl else EARLY if rows is not None and rows <= FEW_ROWS else LATE
    return {"PDL": mode.value, "launch_pdl": pdl, "num_warps": num_warps}


@cache
def measured_plans(table: Path) -> dict[str, Any]:
    """Returns this device's plans in a table of measured plans, by shape; empty if none were measured.

    `table` is a JSON file: device name -> shape -> plans, whose form its reader knows.
    """
    plans: dict[str, dict[str, Any]] = json.loads(table.read_text()) if table.exists() else {}
    return plans.get(torch.cuda.get_device_name(), {})
