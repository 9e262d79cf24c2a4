"""`segue doctor`: tables, JSON and the exit code."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from segue.cli import doctor as command
from segue.cli import main
from segue.doctor.findings import Checkup, Finding, Section

RUNNER = CliRunner()


def run(*words: str) -> Any:
    return RUNNER.invoke(
        main.app, ["doctor", "--device", "cpu", "--port", "0", *words], env={"COLUMNS": "200"}
    )


def test_json_has_every_finding_and_the_verdict() -> None:
    result = run("--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["can_serve"] is True
    names = {each["name"] for section in found["sections"] for each in section["findings"]}
    assert names >= {"Python", "torch", "fa3", "CPU", "attention backend", "bundled model", "pidfd"}


def test_tables_end_with_the_verdict() -> None:
    result = run()
    assert result.exit_code == 0
    assert "Optional packages" in result.stdout
    assert " is the first in the order of preference that runs on cpu" in result.stdout
    assert result.stdout.rstrip().endswith("segue serve can start.")


def test_a_start_that_would_fail_is_exit_code_1_with_the_reason() -> None:
    result = run("--model", "/no/such/model")
    assert result.exit_code == 1
    last = " ".join(result.stdout.split()).partition("segue serve cannot start: ")[2]
    assert last.startswith("model '/no/such/model' does not exist: give a directory")
    assert json.loads(run("--json", "--model", "/no/such/model").stdout)["can_serve"] is False


def test_text_that_looks_like_markup_is_printed_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = Finding(name="[x]", value="[red]", status="failed", remedy="install 'segue[fa3]'")
    found = Checkup.of([Section(title="T", findings=[finding])])
    monkeypatch.setattr(command, "check_up", lambda config: found)
    output = run().stdout
    assert "[x]" in output and "[red]" in output and output.count("segue[fa3]") == 2


@pytest.mark.slow
def test_it_runs_where_packages_of_other_commands_are_missing(tmp_path: Path) -> None:
    for name in ("torch", "uvicorn", "zmq"):  # that fail to import
        (tmp_path / f"{name}.py").write_text("raise ImportError('broken on purpose')\n")
    path = f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = [sys.executable, "-m", "segue", "doctor", "--json", "--port", port]
        result = subprocess.run(
            words,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert result.returncode == 1, result.stderr
    findings = [each for section in json.loads(result.stdout)["sections"] for each in section["findings"]]
    failed = {each["name"]: each for each in findings if each.get("status") == "failed"}
    assert failed.keys() == {"torch", "port"}
    assert "broken on purpose" in failed["torch"]["value"]
