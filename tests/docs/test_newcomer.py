"""What the section "Start" of the README says works as it stands, each step within five minutes."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.docs.newcomer import LIMIT_S, STEPS, clone, commands, follow


def test_the_readme_leads_to_each_step_by_one_command_or_two() -> None:
    assert [len(each) for each in commands(ROOT)] == [2, 1, 1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_newcomer_gets_there_with_the_readme_alone(tmp_path: Path) -> None:
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", 30000)) == 0:
            pytest.skip("another program listens at port 30000, which the README uses")
    checkout = clone(tmp_path / "segue")
    # The packages are those of this environment, so that no network is needed; Segue is the clone's.
    programs = checkout / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, run in (("python", ""), ("segue", "-m segue ")):
        program = programs / name
        source = shlex.quote(str(checkout / "src"))
        program.write_text(f'#!/bin/sh\nPYTHONPATH={source} exec {shlex.quote(sys.executable)} {run}"$@"\n')
        program.chmod(0o755)
    for stamp in ("venv", "install"):
        (checkout / ".venv" / f".stamp-{stamp}").touch()
    status = subprocess.run(["make", "--question", "setup"], cwd=checkout, env=os.environ)
    assert status.returncode == 0, "make would install packages"
    seconds = follow(checkout)
    assert list(seconds) == list(STEPS) and max(seconds.values()) < LIMIT_S
