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
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from segue.bench.circumstances import circumstances as circumstances_of_this_machine

RESULTS = Path(__file__).with_name("results")
WIDTH = 140  # columns of a table if the output is no terminal
SAMPLE = re.compile(r"[\d.]+(, [\d.]+){3}")  # what a GPU does not tell is "[N/A]"
END_S = 10.0  # that nvidia-smi has to end


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
    """Samples the GPU's clocks while the ``with`` block runs."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Clocks:
        if shutil.which("nvidia-smi"):
            self._output = tempfile.TemporaryFile("w+")
            command = _smi("utilization.gpu,clocks.sm,clocks.mem,power.draw")
            self._process = subprocess.Popen([*command, "-l", "1"], stdout=self._output)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()  # it ends behind its next sample: whoever times the block must not wait

    @cached_property
    def seen(self) -> dict[str, float]:
        """Medians over the samples under load; empty without any. To be asked for behind the block."""
        if self._process is None:
            return {}
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with self._output as output:
            output.seek(0)
            lines = output.read().splitlines()
        rows = [[float(field) for field in line.split(",")] for line in lines if SAMPLE.fullmatch(line)]
        busy = [row for row in rows if row[0] > 50]  # the GPU's utilisation, in percent
        if not busy:
            return {}
        sm, memory, power = (statistics.median(column) for column in list(zip(*busy, strict=True))[1:])
        return {"SM, MHz": sm, "memory, MHz": memory, "power, W": power, "samples": len(busy)}


def gpu_memory_mib() -> int:
    """Return the memory of the GPU that is in use, whoever uses it, in MiB."""
    return int(subprocess.check_output(_smi("memory.used"), text=True))


def _smi(fields: str) -> list[str]:
    """Return the command that asks for these fields of the first GPU that this process may use."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    return ["nvidia-smi", f"--id={gpu}", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]


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
