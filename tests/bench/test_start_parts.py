"""What `bench.start_parts` counts; the starts need a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bench.start_parts import Parts


def test_calls_and_their_seconds_are_counted_and_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise ValueError("no")

    parts, owner = Parts(), SimpleNamespace(add=lambda a, *, b: a + b, fail=fail)
    parts.watch(owner, "add", "a sum")
    parts.watch(owner, "fail")
    assert owner.add(1, b=2) == owner.add(2, b=1) == 3
    with pytest.raises(ValueError, match="no"):
        owner.fail()
    parts.show("first")
    shown = capsys.readouterr().out
    assert "first:" in shown and "a sum" in shown and "     2 calls" in shown and "     1 calls" in shown
    parts.show("second")
    assert capsys.readouterr().out == "second:\n"
