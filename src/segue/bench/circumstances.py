"""The circumstances of a measurement: the machine, and the versions of what was measured."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import segue
from segue.doctor.machine import cpu_name, driver_gpus, num_cores
from segue.doctor.versions import version_of
from segue.errors import BenchmarkError

PACKAGES = ("torch", "transformers", "triton", "tokenspeed-fa3", "flashinfer-python")


def circumstances() -> dict[str, Any]:
    """Return the date, the CPU, the first GPU if there is one, and the versions."""
    gpus = driver_gpus()
    versions = {name: version_of(name) for name in PACKAGES}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "segue": segue.__version__,
        "cpu": cpu_name(),
        "cores": num_cores(),
        **({"device": gpus[0].name, "driver": gpus[0].driver} if gpus else {}),
        "python": platform.python_version(),
        **{name: version for name, version in versions.items() if version is not None},
    }


def save(path: Path, figures: Mapping[str, Any]) -> None:
    """Write figures as JSON, after the circumstances of this process.

    Raises:
        BenchmarkError: the file cannot be written.
    """
    text = json.dumps({"circumstances": circumstances(), **figures}, indent=1) + "\n"
    try:
        path.write_text(text)
    except OSError as error:
        raise BenchmarkError(f"cannot write the figures to {path} ({error.strerror})") from error
