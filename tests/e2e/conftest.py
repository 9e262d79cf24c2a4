"""Provides one shared engine to the tests that only pause and flush, and the network of NIXL's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import segue
from tests.support.fake_engine import assert_nothing_left
from tests.support.held_steps import HELD_WORKER, StepGate


@pytest.fixture(scope="session")
def steps_gate(tmp_path_factory: pytest.TempPathFactory) -> StepGate:
    """The gate of the shared engine's steps: while it is closed, no request can end before a pause."""
    return StepGate(tmp_path_factory.mktemp("gate") / "steps")


class HeldEngine(segue.Engine):
    """The real engine; a test can hold its steps."""

    _worker_command = HELD_WORKER


@pytest.fixture(scope="session")
def shared_engine(steps_gate: StepGate) -> Iterator[segue.Engine]:
    options = {"dtype": "float32", "page_size": 16, "num_kv_tokens": 1024, "log_level": "warning"}
    # The start runs a step of the largest size, to see how much memory that takes.
    with pytest.MonkeyPatch.context() as patch:
        for name, value in steps_gate.environment.items():
            patch.setenv(name, value)
        engine = HeldEngine(max_running_requests=4, chunked_prefill_size=64, **options)
    with engine:
        yield engine


@pytest.fixture
def engine(shared_engine: segue.Engine, steps_gate: StepGate) -> Iterator[segue.Engine]:
    """Yields the engine with an empty cache; after the test, no request and no KV may remain."""
    assert shared_engine.flush_cache(timeout=10).success
    yield shared_engine
    steps_gate.open()
    shared_engine.continue_generation()
    assert shared_engine.flush_cache(timeout=30).success
    assert_nothing_left(shared_engine)  # and the scheduler's invariants hold


@pytest.fixture(scope="module")
def nixl_over_tcp() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp,self")
        yield
