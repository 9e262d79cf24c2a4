"""Fixtures of all tests of the router."""

from __future__ import annotations

import pytest

from segue.router import watch


@pytest.fixture(autouse=True)
def lost_workers_are_soon_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router in the test's own process connects to a lost worker again after 20 ms, not 250."""
    monkeypatch.setattr(watch, "RETRY_S", 0.02)
