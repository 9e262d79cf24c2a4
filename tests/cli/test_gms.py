"""`segue gms` against a real service."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from segue.cli.gms import gms_app
from segue.errors import MemoryServiceError
from segue.gms.supervisor import GMS_COMMAND
from segue.gms.transport import HOLDER_SOCKET
from tests.gms.running import SLAB, end, manifest, running, start, target, until


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


def test_a_stopped_service_or_holder_is_not_ready(tmp_path: Path) -> None:
    place = ("--gms-dir", str(tmp_path / "d"), "--timeout-s", "0.3")
    with pytest.raises(MemoryServiceError, match=r"no holder .* \(No such file or directory\); start one"):
        run("ready", "--holder", *place)
    holder = start(tmp_path / "d", command="hold")
    try:
        until((tmp_path / "d" / HOLDER_SOCKET).exists, "the holder does not start")
        with running(tmp_path / "d") as service:
            assert run("ready", "--holder", *place) == "ready: the holder of descriptors\n"
            for process, words in ((service, ("ready",)), (holder, ("ready", "--holder"))):
                process.send_signal(signal.SIGSTOP)
                with pytest.raises(MemoryServiceError, match="timed out"):
                    run(*words, *place)
                process.send_signal(signal.SIGCONT)
                until(lambda w=words: is_ready(*w, *place), "it does not go on")
    finally:
        end(holder)


def is_ready(*words: str) -> bool:
    return CliRunner().invoke(gms_app, words).exit_code == 0


def test_the_service_by_itself_prints_errors_in_one_line(tmp_path: Path) -> None:
    command = [*GMS_COMMAND, "ready", "--gms-dir", str(tmp_path), "--timeout-s", "0"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.startswith("segue: no memory service answers") and found.stderr.count("\n") == 1
