"""What results say of the machine that they were measured on."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import pytest

from bench import report
from tests.support.polling import rest


def test_a_model_is_stored_by_its_name_without_the_temporary_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    place = f"{tempfile.gettempdir()}/tmp1/qwen3-8b"
    options = ["--model", place, f"--model={place}", "--load-format", "dummy", "/var" + place]
    found = json.loads(report.save("name", {"options": options}).read_text())
    expected = ["--model", "qwen3-8b", "--model=qwen3-8b", "--load-format", "dummy", "/var" + place]
    assert found["options"] == expected


def test_no_stored_result_has_a_temporary_folder() -> None:
    texts = {path.name: path.read_text() for path in report.RESULTS.glob("*.json")}
    assert texts and not [name for name, text in texts.items() if re.search(r'["=]/tmp/', text)]


NVIDIA_SMI = """#!{python}
# Prints samples, and does not end on SIGTERM before the file `go` exists, as the real one goes on sleeping.
import pathlib, signal, sys, time
folder = pathlib.Path(__file__).parent
def end(*_):
    began = time.monotonic()
    while not (folder / "go").exists() and time.monotonic() < began + 30:
        time.sleep(0.01)
    sys.exit()
signal.signal(signal.SIGTERM, end)
for row in ("4, 345, 2000, 80.5", "99, 1980, 3201, [N/A]", "90, 1980, 3201, 600.5"):
    print(row, flush=True)
print("95, 1935, 3201, 650.5\\n99, 1950, 3201, 700.5", flush=True)
(folder / "starting").write_text(" ".join(sys.argv[1:]))
(folder / "starting").rename(folder / "started")
signal.pause()
"""


def test_who_times_a_block_does_not_wait_for_the_end_of_its_clocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    with report.Clocks() as clocks:
        began = time.monotonic()
        while not (tmp_path / "started").exists():
            assert time.monotonic() < began + 30, "the program did not start"
            rest(began)
    assert "--id=3 " in (tmp_path / "started").read_text()
    assert time.monotonic() < began + 30, "the block waited for the end of the program"
    (tmp_path / "go").touch()
    first = clocks.seen
    assert first == {"SM, MHz": 1950, "memory, MHz": 3201, "power, W": 650.5, "samples": 3}
    assert clocks.seen is first


def test_a_machine_without_a_gpu_has_no_clocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with report.Clocks() as clocks:
        pass
    assert clocks.seen == {}
