"""`segue gms` against a real service."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from segue.cli.gms import gms_app
from segue.errors import MemoryServiceError
from tests.gms.running import SLAB, manifest, running, target


def run(*words: str) -> str:
    result = CliRunner().invoke(gms_app, words, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_ready_status_and_events_show_the_service(tmp_path: Path) -> None:
    place = ("--gms-dir", str(tmp_path / "d"))
    with running(tmp_path / "d"), target(tmp_path / "d", engine="engine-a") as client:
        grant = client.ask(manifest(2))
        for descriptor in client.allocate(grant.lease, [SLAB, SLAB]):
            os.close(descriptor)
        assert run("ready", *place) == "ready: cpu\n"
        found = json.loads(run("status", "--json", *place))
        assert found["devices"] == {"cpu": 2 * SLAB}
        assert [each["state"] for each in found["generations"]] == ["being written"]
        table = run("status", *place)
        assert "4 MiB" in table and "engine-a" in table
        assert "rw_granted" in run("events", "--once", *place)


def test_without_a_service_the_remedy_is_named(tmp_path: Path) -> None:
    for command in ("ready", "status", "events"):
        with pytest.raises(MemoryServiceError, match="segue gms serve --gms-dir"):
            run(command, "--gms-dir", str(tmp_path), *(["--timeout-s", "0"] if command == "ready" else []))
