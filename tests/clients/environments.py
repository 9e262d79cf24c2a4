"""The environments of other projects' programs, which `make clients` installs into `.clients/`."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ROOT / ".clients"


def interpreter(name: str) -> Path:
    """The Python of one environment; the test is skipped if the environment is not installed.

    It also imports everything of `.venv`, except what the environment has in another version.

    Args:
        name: The NAME of `requirements-NAME.txt` or `no-deps-NAME.txt` beside this file.
    """
    if not (CLIENTS / f"stamp-{name}").exists():
        pytest.skip(f"the environment {name!r} is not installed; `make clients` installs it")
    return CLIENTS / name / "bin" / "python"


def command(name: str, program: str) -> list[str]:
    """How to start a program that an environment has in its `bin` directory."""
    return [str(interpreter(name)), str(CLIENTS / name / "bin" / program)]
