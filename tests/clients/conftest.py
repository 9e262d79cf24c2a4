"""The environments of other projects' programs, as a fixture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.environments import interpreter


@pytest.fixture(scope="session")
def client_python() -> Callable[[str], Path]:
    """Gives the Python of an environment by its name; skips the test if `make clients` did not make it."""
    return interpreter
