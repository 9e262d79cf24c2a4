"""What an engine leaves for its successor about a pause."""

from __future__ import annotations

from pathlib import Path

import pytest

from segue.failover import control_note
from segue.failover.control_note import ControlNotes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(control_note, "_now", lambda: now[0])
    return now


def test_a_successor_gets_what_is_left_of_a_pause(tmp_path: Path, clock: list[float]) -> None:
    mine, successor = ControlNotes(tmp_path, "a"), ControlNotes(tmp_path, "a")
    assert successor.left() is None
    mine.put(1, "abort", 30.0)
    clock[0] += 10
    assert successor.left() == ("abort", 20.0) and ControlNotes(tmp_path, "b").left() is None
    clock[0] += 20
    assert successor.left() is None
    mine.put(1, "in_place", None)
    assert successor.left() == ("retract", None)
    mine.remove(1)
    assert successor.left() is None
    assert list(tmp_path.iterdir()) == []


def test_an_older_engine_changes_nothing_any_more(tmp_path: Path, clock: list[float]) -> None:
    notes = ControlNotes(tmp_path, "a")
    notes.put(2, "wait", None)
    notes.put(1, "abort", None)
    notes.remove(1)
    assert notes.left() == ("wait", None)


def test_a_note_of_another_boot_or_that_cannot_be_read_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = ControlNotes(tmp_path, "a")
    notes.put(1, "abort", None)
    monkeypatch.setattr(control_note, "boot_id", lambda: "another")
    assert notes.left() is None
    (tmp_path / "control-a.json").write_text("{")
    assert notes.left() is None
    notes.put(1, "retract", None)
    assert notes.left() == ("retract", None)
