"""Prints results as a small table, and stores them as JSON with their circumstances."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from segue.bench.circumstances import circumstances as circumstances_of_this_machine

RESULTS = Path(__file__).with_name("results")
WIDTH = 140  # columns of a table if the output is no terminal


def circumstances() -> dict[str, Any]:
    """Return the machine, the versions and the commit of a measurement.

    In a copy of the tree without its history, the environment variable ``BENCH_COMMIT`` names the commit.
    """
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=RESULTS.parent, capture_output=True, text=True
    )
    found = circumstances_of_this_machine()
    return {
        "date": found.pop("date"),
        "commit": os.environ.get("BENCH_COMMIT") or commit.stdout.strip(),
        **found,
    }


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


def gpu_memory_mib() -> int:
    """Return the memory of the GPU that is in use, whoever uses it, in MiB."""
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    command = ["nvidia-smi", f"--id={device}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.check_output(command, text=True))


def _smi(fields: str) -> list[str]:
    return ["nvidia-smi", "--id=0", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]


def save(name: str, figures: dict[str, Any]) -> Path:
    """Write ``results/NAME.json``, which calls files of the temporary directory by their names alone."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    text = json.dumps({"circumstances": circumstances(), **figures}, indent=1)
    folders = rf'(?<=["=]){re.escape(tempfile.gettempdir())}/(?:[^/"]+/)*'
    path.write_text(re.sub(folders, "", text) + "\n")
    return path


def show(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table; all columns but the first are right-aligned."""
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)
