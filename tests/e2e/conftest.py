"""One engine for the tests that only pause and flush."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import segue
from tests.support.fake_engine import assert_nothing_left


@pytest.fixture(scope="session")
def shared_engine() -> Iterator[segue.Engine]:
    options = {"dtype": "float32", "page_size": 16, "num_kv_tokens": 1024, "log_level": "warning"}
    with segue.Engine(max_running_requests=4, **options) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: segue.Engine) -> Iterator[segue.Engine]:
    """With an empty cache; after the test nothing may be left in it."""
    assert shared_engine.flush_cache(timeout=10).success
    yield shared_engine
    shared_engine.continue_generation()
    assert shared_engine.flush_cache(timeout=30).success
    assert_nothing_left(shared_engine)  # and the scheduler's invariants hold
