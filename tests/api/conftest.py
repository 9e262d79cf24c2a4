"""One engine for most tests of a module; after each, nothing may be left in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fake_engine import FakeEngine, assert_nothing_left


@pytest.fixture(scope="module")
def shared_engine(tiny_model: Path) -> Iterator[FakeEngine]:
    with FakeEngine(str(tiny_model), load_format="dummy", log_level="error") as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: FakeEngine) -> Iterator[FakeEngine]:
    """One engine for a module; after each test nothing may be left in it."""
    yield shared_engine
    assert_nothing_left(shared_engine)
