"""What processes that start others need: where a child finds this package, and how it ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path


def import_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which a child finds this package; empty where it is installed."""
    root = Path(__file__).resolve().parents[1]
    if root.name in ("site-packages", "dist-packages"):
        return {}
    rest = environment.get("PYTHONPATH")
    return {"PYTHONPATH": f"{root}{os.pathsep}{rest}" if rest else str(root)}


def describe_exit(code: int) -> str:
    """Return an exit code in words."""
    if code >= 0:
        return f"with exit code {code}"
    hint = ", perhaps because memory ran out" if -code == signal.SIGKILL else ""
    return f"by signal {signal.Signals(-code).name}{hint}"
