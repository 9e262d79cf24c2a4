"""Prints results as a small table, and stores them as JSON with their circumstances."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).with_name("results")
WIDTH = 140  # columns of a table if the output is no terminal


def circumstances() -> dict[str, Any]:
    """Return the machine, the versions and the commit of a measurement.

    In a copy of the tree without its history, the environment variable ``BENCH_COMMIT`` names the commit.
    """
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=RESULTS.parent, capture_output=True, text=True
    )
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": os.environ.get("BENCH_COMMIT") or commit.stdout.strip(),
        "cpu": cpu[0].partition(": ")[2] if cpu else platform.processor(),
        "cores": num_cores(),
        **_device(),
        "python": platform.python_version(),
        **_versions("torch", "transformers", "triton", "tokenspeed-fa3"),
    }


def _device() -> dict[str, str]:
    found = _query("name,driver_version").partition(", ")
    return {"device": found[0], "driver": found[2]} if found[2] else {}


class Clocks:
    """Samples the GPU's clocks while the ``with`` block runs; without a GPU, `seen` stays empty."""

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}  # medians over the seconds under load

    def __enter__(self) -> Clocks:
        self._process = None
        if shutil.which("nvidia-smi"):
            self._process = subprocess.Popen(
                [*_smi("utilization.gpu,clocks.sm,clocks.mem,power.draw"), "-l", "1"],
                stdout=subprocess.PIPE,
                text=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._process.terminate()
        lines = self._process.communicate()[0].splitlines()
        rows = [[float(field) for field in line.split(",")] for line in lines if line.count(",") == 3]
        busy = [row for row in rows if row[0] > 50]  # the GPU's utilisation, in percent
        if busy:
            sm, memory, power = (statistics.median(column) for column in list(zip(*busy, strict=True))[1:])
            self.seen = {"SM, MHz": sm, "memory, MHz": memory, "power, W": power, "samples": len(busy)}


def _query(fields: str) -> str:
    if not shutil.which("nvidia-smi"):
        return ""
    return subprocess.run(_smi(fields), capture_output=True, text=True).stdout.strip()


def _smi(fields: str) -> list[str]:
    return ["nvidia-smi", "--id=0", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]


def _versions(*names: str) -> dict[str, str]:
    """Return the version of each of these packages that is installed."""
    found = {}
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def save(name: str, figures: dict[str, Any]) -> Path:
    """Write ``results/NAME.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"circumstances": circumstances(), **figures}, indent=1) + "\n")
    return path


def show(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; all columns but the first are right-aligned."""
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)
