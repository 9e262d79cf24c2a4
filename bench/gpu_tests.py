"""Runs the GPU tests, each file in a process of its own, and stores their results in ``gpu_tests.json``.

A run of some files replaces only the results of these files, so the stored results may come from several
runs; each file's result has the commit and the device of its run::

    python -m bench.gpu_tests
    python -m bench.gpu_tests --at-once 5
    python -m bench.gpu_tests tests/gpu/test_engine.py tests/gpu/test_tp.py --pytest-args="-m gpu"

Files with the marker ``alone`` measure the memory of the device, or need most of it: no other file runs
beside them. An H200 with 16 cores has run seven of the others at once.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from bench import report

ROOT = Path(__file__).resolve().parent.parent
NAME = "gpu_tests"
MARKED = "gpu and not slow"
COUNTS = ("passed", "failed", "skipped")
OF_A_FILE = ("commit", "date", "device", "driver", "python", "torch", "triton")
NOTHING_COLLECTED = 5  # pytest's exit code: every test of the file has another marker


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the files, show a table, and return 1 if a test failed and 2 without a CUDA device."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", help="default: every file of tests/gpu")
    parser.add_argument("--pytest-args", default="", help="more arguments of pytest, in one word")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="files that run at a time")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("there is no CUDA device: nothing was tested and nothing is stored", file=sys.stderr)
        return 2
    files = given.files or sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/gpu/test_*.py"))
    ended = run(files, shlex.split(given.pytest_args), given.at_once)
    rows = [
        [file, *(str(each[count]) for count in COUNTS), f"{each['seconds']:.1f}"]
        for file, each in ended.items()
    ]
    report.show("GPU tests", ["file", *COUNTS, "seconds"], rows)
    return 1 if any(each["failed"] for each in ended.values()) else 0


def run(files: Sequence[str], arguments: Sequence[str], at_once: int = 1) -> dict[str, dict[str, Any]]:
    """Run each file and return its result; each is stored at once, so that an aborted run keeps it."""
    ended: dict[str, dict[str, Any]] = {}
    for file, result in _results(files, arguments, at_once):
        ended[file] = result
        store({file: result})
    return ended


def _results(
    files: Sequence[str], arguments: Sequence[str], at_once: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each file and its result when it has ended: first those that may run beside others."""
    alone = [file for file in files if "pytest.mark.alone" in (ROOT / file).read_text()]
    with ThreadPoolExecutor(at_once) as pool:
        running = {
            pool.submit(_run, file, arguments, shows=at_once == 1): file
            for file in files
            if file not in alone
        }
        for done in as_completed(running):
            yield running[done], done.result()
    for file in alone:
        yield file, _run(file, arguments, shows=True)


def store(ended: dict[str, dict[str, Any]]) -> None:
    """Replace the stored results of these files, and drop the results of files that no longer exist."""
    path = report.RESULTS / f"{NAME}.json"
    stored = json.loads(path.read_text())["files"] if path.exists() else {}
    merged = {file: each for file, each in sorted((stored | ended).items()) if (ROOT / file).exists()}
    totals = {count: sum(each[count] for each in merged.values()) for count in (*COUNTS, "seconds")}
    commits = sorted({each["commit"] for each in merged.values()})
    report.save(NAME, {"totals": totals, "commits": commits, "files": merged})


def _run(file: str, arguments: Sequence[str], *, shows: bool) -> dict[str, Any]:
    """Run one file by pytest and return its counts of tests, its seconds and its circumstances.

    With ``shows`` the output is shown as it comes, and otherwise at the end.
    """
    found = report.circumstances()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-m", MARKED, file, f"--junitxml={path}", *arguments]
        output = None if shows else subprocess.PIPE
        ended = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, text=True)
        if not shows:
            print(f"== {file}\n{ended.stdout}", flush=True)
        counts = _counts(path) if path.exists() else dict.fromkeys(COUNTS, 0)
    if ended.returncode not in (0, NOTHING_COLLECTED):
        counts["failed"] = max(counts["failed"], 1)  # a process that died reports no failed test
    circumstances = {name: found[name] for name in OF_A_FILE if name in found}
    seconds = round(time.monotonic() - began, 1)
    return circumstances | counts | {"exit_code": ended.returncode, "seconds": seconds}


def _counts(junit: Path) -> dict[str, int]:
    """Return how many tests passed, failed and were skipped, from pytest's report in JUnit's XML."""
    suites = list(ElementTree.parse(junit).getroot().iter("testsuite"))
    number = {
        key: sum(int(suite.get(key, 0)) for suite in suites)
        for key in ("tests", "failures", "errors", "skipped")
    }
    failed = number["failures"] + number["errors"]
    return {
        "passed": number["tests"] - failed - number["skipped"],
        "failed": failed,
        "skipped": number["skipped"],
    }


if __name__ == "__main__":
    sys.exit(main())
