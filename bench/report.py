"""Where results go: a small table for the reader, JSON with the circumstances for the record."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).with_name("results")


def circumstances() -> dict[str, Any]:
    """The machine, the versions and the commit that a figure holds for."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=RESULTS.parent, capture_output=True, text=True
    )
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
        "cpu": cpu[0].partition(": ")[2] if cpu else platform.processor(),
        "cores": num_cores(),
        **_device(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "transformers")},
    }


def _device() -> dict[str, str]:
    import torch

    return {"device": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def save(name: str, figures: dict[str, Any]) -> Path:
    """Write ``results/NAME.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"circumstances": circumstances(), **figures}, indent=1) + "\n")
    return path


def show(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, numbers right-aligned."""
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
