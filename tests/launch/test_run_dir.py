from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from segue.config import EngineConfig
from segue.launch.processes import WorkerProcesses
from segue.launch.run_dir import OWNER, RunDir

HOLDER = """
import tempfile, time, sys
from segue.launch.run_dir import RunDir
tempfile.tempdir = sys.argv[1]
print(RunDir().path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for the directories of this test alone, with a short name."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="t-") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


@pytest.mark.parametrize(
    "name", [b"x" * 75, "\N{SNOWMAN}".encode() * 25]
)  # of the same length in bytes, not in characters
def test_the_directory_is_private_and_its_sockets_fit(
    name: bytes, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = place / os.fsdecode(name)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    run_dir = RunDir()
    assert stat.S_IMODE(run_dir.path.stat().st_mode) == 0o700
    addresses = WorkerProcesses(EngineConfig(), run_dir).addresses
    assert max(len(os.fsencode(each)) for each in addresses) - len("ipc://") <= 107
    assert list(long.iterdir()) == []
    run_dir.remove()
    run_dir.remove()
    assert not run_dir.path.exists()


def test_what_a_killed_process_leaves_is_removed_by_the_next_one(place: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        mine = RunDir()
        assert left.exists(), "its process lives"
        process.send_signal(signal.SIGKILL)
    other = RunDir()
    assert not left.exists()
    assert mine.path.exists(), "this process lives"
    mine.remove()
    other.remove()


def test_a_directory_without_an_owner_is_left_alone(place: Path) -> None:
    for name in ("segue-new", "segue-other"):
        (place / name).mkdir()
    (place / "segue-other" / OWNER).mkdir()  # not what this code makes
    RunDir().remove()
    assert {path.name for path in place.iterdir()} == {"segue-new", "segue-other"}
