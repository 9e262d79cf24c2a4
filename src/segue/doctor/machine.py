"""The machine: its CPU and memory, and its GPUs as the driver's own program sees them. It needs no torch."""

from __future__ import annotations

import csv
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from segue.doctor.findings import Finding
from segue.errors import OutOfMemoryError
from segue.host import free_cpu_memory, read_number
from segue.memory.budget import gib

# Of the many flags of a CPU those that its matrix products profit from, by the kernel's names.
FEATURES = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "sve",
    "bf16",
    "i8mm",
)
_SMI_S = 20.0  # a driver that has not been used for a while takes seconds
_HUGE = Path("sys/kernel/mm/transparent_hugepage")


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverGpu:
    """One GPU, as nvidia-smi lists it."""

    name: str
    capability: str  # compute capability, such as "9.0"
    driver: str
    total_mib: str
    free_mib: str


def cpu_name(root: Path = Path("/")) -> str:
    """Return the CPU's name, or the architecture where the kernel gives no name."""
    return _cpuinfo(root).get("model name") or platform.processor() or platform.machine()


def cpu_features(root: Path = Path("/")) -> list[str]:
    """Return those of `FEATURES` that the CPU has."""
    fields = _cpuinfo(root)
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return [feature for feature in FEATURES if feature in flags]


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def driver_gpus() -> list[DriverGpu]:
    """Return the GPUs that nvidia-smi lists; none if there is no such program, or it fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    fields = "name,compute_cap,driver_version,memory.total,memory.free"
    try:
        found = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_SMI_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in row] for row in csv.reader(found.stdout.splitlines())]
    return [
        DriverGpu(name=row[0], capability=row[1], driver=row[2], total_mib=row[3], free_mib=row[4])
        for row in rows
        if len(row) == 5
    ]


def describe_machine(root: Path = Path("/")) -> list[Finding]:
    """Return the findings about CPU, memory and huge pages."""
    features = ", ".join(cpu_features(root)) or "none that matrix products profit from"
    return [
        Finding(name="CPU", value=f"{cpu_name(root)}, {num_cores()} cores for this process"),
        Finding(name="CPU features", value=features),
        _memory(root),
        _huge_pages(root),
    ]


def describe_gpus(gpus: list[DriverGpu]) -> list[Finding]:
    """Return a finding for each GPU of the driver."""
    if not gpus:
        return [Finding(name="GPU", value="none that nvidia-smi lists")]
    return [
        Finding(
            name=f"GPU {number}",
            value=f"{gpu.name}, compute capability {gpu.capability}, {gpu.free_mib} of {gpu.total_mib} MiB "
            f"free, driver {gpu.driver}",
        )
        for number, gpu in enumerate(gpus)
    ]


def _cpuinfo(root: Path) -> dict[str, str]:
    """Return the fields of the first processor."""
    try:
        first = (root / "proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return {}
    return {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())
    }


def _memory(root: Path) -> Finding:
    total = read_number(root / "proc/meminfo", "MemTotal")
    try:
        free = free_cpu_memory(root)
    except OutOfMemoryError as error:
        return Finding(name="memory", value="unknown", status="missing", remedy=error.message)
    of = "" if total is None else f" of {gib(total * 1024)}"
    return Finding(
        name="memory", value=f"{gib(free)} free{of}", why="control groups of this process are counted"
    )


def _huge_pages(root: Path) -> Finding:
    """Return how the kernel gives huge pages to private and to shared memory: both profit from them."""
    parts = []
    for file, kind in (("enabled", "private"), ("shmem_enabled", "shared")):
        try:
            chosen = (root / _HUGE / file).read_text().partition("[")[2].partition("]")[0]
        except OSError:
            chosen = "not built into the kernel"
        parts.append(f"{kind} memory: {chosen}")
    return Finding(name="huge pages", value="; ".join(parts))
