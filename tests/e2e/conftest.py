"""Provides one shared engine to the tests that only pause and flush, and the network of NIXL's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import segue
from tests.support.fake_engine import assert_nothing_left


@pytest.fixture(scope="session")
def shared_engine() -> Iterator[segue.Engine]:
    options = {"dtype": "float32", "page_size": 16, "num_kv_tokens": 1024, "log_level": "warning"}
    # The start runs a step of the largest size, to see how much memory that takes.
    with segue.Engine(max_running_requests=4, chunked_prefill_size=64, **options) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: segue.Engine) -> Iterator[segue.Engine]:
    """Yields the engine with an empty cache; after the test, no request and no KV may remain."""
    assert shared_engine.flush_cache(timeout=10).success
    yield shared_engine
    shared_engine.continue_generation()
    assert shared_engine.flush_cache(timeout=30).success
    assert_nothing_left(shared_engine)  # and the scheduler's invariants hold


@pytest.fixture(scope="module")
def nixl_over_tcp() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp,self")
        yield
