"""The stored results of a run of the GPU tests; small test files stand in for the GPU tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_tests, report

FILES = {
    "test_good.py": "def test_one(): pass\ndef test_two(): pass\n",
    "test_mixed.py": "import pytest\ndef test_bad(): assert 0\ndef test_left(): pytest.skip('no')\n",
    "test_broken.py": "import no_such_module\n",
    "test_dying.py": "import os\ndef test_dying(): os._exit(3)\n",
    "test_slow.py": "import pytest\n@pytest.mark.slow\ndef test_slow(): pass\n",
}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree without history, in which every test is marked as a GPU test."""
    (tmp_path / "tests/gpu").mkdir(parents=True)
    for name, text in FILES.items():
        marked = f"import pytest\npytestmark = pytest.mark.gpu\n{text}"
        (tmp_path / "tests/gpu" / name).write_text(marked)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu: x\n  slow: x\n  alone: x\n")
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    monkeypatch.setenv("BENCH_COMMIT", "first")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-q -p no:cacheprovider")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # loading them takes longer than the tests
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    return tmp_path


def stored(tree: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tree / "results/gpu_tests.json").read_text())
    return found


def counts(entry: dict[str, Any]) -> tuple[int, int, int]:
    return entry["passed"], entry["failed"], entry["skipped"]


def test_every_file_is_stored_with_its_counts_commit_and_seconds(tree: Path) -> None:
    assert gpu_tests.main([]) == 1
    found = stored(tree)
    files = {file.removeprefix("tests/gpu/"): each for file, each in found["files"].items()}
    assert {name: counts(each) for name, each in files.items()} == {
        "test_good.py": (2, 0, 0),
        "test_mixed.py": (0, 1, 1),
        "test_broken.py": (0, 1, 0),
        "test_dying.py": (0, 1, 0),
        "test_slow.py": (0, 0, 0),
    }
    assert counts(found["totals"]) == (2, 3, 1)
    assert all(each["commit"] == "first" and each["seconds"] > 0 and each["date"] for each in files.values())
    assert found["commits"] == ["first"]


def test_runs_of_some_files_are_merged(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, slow = "tests/gpu/test_good.py", "tests/gpu/test_slow.py"
    assert gpu_tests.main([good]) == 0
    monkeypatch.setenv("BENCH_COMMIT", "second")
    assert gpu_tests.main([slow, "--pytest-args=-m gpu"]) == 0
    found = stored(tree)
    assert {file: each["commit"] for file, each in found["files"].items()} == {good: "first", slow: "second"}
    assert counts(found["totals"]) == (3, 0, 0)
    assert found["commits"] == ["first", "second"]
    (tree / good).unlink()
    assert gpu_tests.main([slow]) == 0
    assert list(stored(tree)["files"]) == [slow]
    assert counts(stored(tree)["totals"]) == (0, 0, 0)


def test_files_run_at_once_but_what_is_to_be_alone_runs_alone(
    tree: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    meeting = """
import os, pathlib, time
here = pathlib.Path("running")
def test_meeting():
    here.mkdir(exist_ok=True)
    (here / str(os.getpid())).touch()
    deadline = time.monotonic() + 60
    while len(list(here.iterdir())) < 2:
        assert time.monotonic() < deadline, "the other file does not run"
        time.sleep(0.01)
def test_end():
    (here / "ended" ).touch()
"""
    alone = """
import pathlib, pytest
pytestmark = [pytest.mark.gpu, pytest.mark.alone]
def test_the_others_have_ended():
    assert len(list(pathlib.Path("running").iterdir())) == 3
"""
    texts = {"test_a.py": alone, "test_b.py": meeting, "test_c.py": meeting}
    files = [f"tests/gpu/{name}" for name in texts]
    for file, text in zip(files, texts.values(), strict=True):
        (tree / file).write_text(f"import pytest\npytestmark = pytest.mark.gpu\n{text}")
    assert gpu_tests.main([*files, "--at-once=2"]) == 0
    assert {counts(each) for each in stored(tree)["files"].values()} == {(1, 0, 0), (2, 0, 0)}
    shown = capfd.readouterr().out
    assert all(f"== {file}\n" in shown for file in files[1:])


def test_nothing_is_stored_without_a_device(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # loading them takes longer than the tests
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_tests.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not (tree / "results").exists()
