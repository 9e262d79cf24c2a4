"""What a probe asks of the memory service, which it does every few seconds for as long as a pod lives."""

from __future__ import annotations

from pathlib import Path

import pytest

from segue.cli.gms import gms_app
from segue.gms import messages as wire
from segue.gms.readiness import check_service
from tests.gms.running import DEADLINE_S, target, until
from tests.gms.serving import serving


def test_probes_leave_no_trace_in_the_events(tmp_path: Path) -> None:
    """The service keeps the last 256 of them, for people."""
    with serving(tmp_path / "d") as directory, target(directory, tag="watch") as looks:
        for _ in range(3):
            assert check_service(str(directory), None, DEADLINE_S) == ["cpu"]
        until(lambda: len(looks.status()["sessions"]) == 1, "the sessions of the probes have ended")
        assert looks.events() == []


def test_a_service_that_has_no_room_for_a_probe_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It must not be killed because many engines use it."""
    with serving(tmp_path / "d") as directory:
        monkeypatch.setattr(wire, "MAX_SESSIONS", 0)
        assert check_service(str(directory), None, DEADLINE_S) == []
        gms_app(["ready", "--gms-dir", str(directory)], standalone_mode=False)
    assert capsys.readouterr().out == "ready: all of its 0 sessions are in use\n"
