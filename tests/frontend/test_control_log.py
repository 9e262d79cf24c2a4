"""What the log of control events keeps."""

from __future__ import annotations

import pytest

from segue.errors import InvalidRequestError
from segue.frontend.control_log import MOST_CHARS, MOST_ENTRIES, ControlLog, EngineLog
from segue.messages.weight_update import WeightNotice


def test_entries_have_numbers_and_the_oldest_are_dropped() -> None:
    log = ControlLog()
    for number in range(MOST_ENTRIES + 20):
        log.add("flush", f"{number}" * 100)
    assert [entry.number for entry in log.since(MOST_ENTRIES + 18)] == [MOST_ENTRIES + 19, MOST_ENTRIES + 20]
    assert log.since(MOST_ENTRIES + 20) == []
    kept = log.since(0)
    assert len(kept) == MOST_ENTRIES and kept[0].number == 21
    assert max(len(entry.text) for entry in kept) == MOST_CHARS


def test_what_is_timed_is_noted_when_it_ends_and_a_failure_with_its_reason() -> None:
    log = ControlLog()
    with log.timed("pause", "pause (wait)") as noted:
        noted.text += ": 2 running"
        assert not log.entries
    with pytest.raises(InvalidRequestError), log.timed("role", "change of the role to decode"):
        raise InvalidRequestError("no", param=None)
    with pytest.raises(KeyError), log.timed("role", "what a bug interrupts"):
        raise KeyError
    found = [(entry.text, entry.failed, entry.seconds is not None) for entry in log.entries]
    assert found == [
        ("pause (wait): 2 running", False, True),
        ("change of the role to decode: no", True, True),
    ]


def test_the_end_of_a_pause_has_the_seconds_since_its_begin_also_if_it_became_stronger() -> None:
    log = EngineLog()
    for mode, now in (("wait", 10.0), ("abort", 11.0), (None, 14.5), ("retract", 20.0), (None, 21.0)):
        log.note_pause(mode, now)  # type: ignore[arg-type]
    assert [entry.seconds for entry in log.entries] == [4.5, 1.0]


def test_weights_are_logged_by_what_has_changed() -> None:
    log, before = EngineLog(), WeightNotice(version="0")
    figures = {"timings": {"write_s": 0.0112, "total_s": 1.5}}
    for after in (
        WeightNotice(version="0", state="receiving"),
        WeightNotice(version="1", num_committed=1, last=figures),
        WeightNotice(version="one", num_committed=1, last=figures),
        WeightNotice(version="one", num_committed=1, num_failed=1, poisoned="half", last=figures),
    ):
        log.note_weights(before, after)
        before = after
    assert [(entry.text, entry.seconds, entry.failed) for entry in log.entries] == [
        ("version 1 is served; generation stopped for 11.2 ms", 1.5, False),
        ("the weights are called version one", None, False),
        ("an update failed", None, True),
        ("the weights are poisoned: half", None, True),
    ]
