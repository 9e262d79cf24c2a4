"""The machine, read from files of another machine, and GPUs from an nvidia-smi that is a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from segue.doctor.machine import cpu_features, cpu_name, describe_gpus, describe_machine, driver_gpus

CPUINFO = """processor\t: 0
model name\t: Some CPU @ 2 GHz
flags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16 amx_tile

processor\t: 1
model name\t: Another
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in {
        "proc/cpuinfo": CPUINFO,
        "proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_cpu_memory_and_huge_pages_are_named(root: Path) -> None:
    assert cpu_name(root) == "Some CPU @ 2 GHz"
    assert cpu_features(root) == ["avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16"]
    found = {each.name: each.value for each in describe_machine(root)}
    assert found["memory"] == "4.00 GiB free of 8.00 GiB"
    assert found["huge pages"] == "private memory: madvise; shared memory: not built into the kernel"


def test_a_kernel_that_tells_nothing_is_no_error(tmp_path: Path) -> None:
    found = {each.name: each for each in describe_machine(tmp_path)}
    assert found["memory"].status == "missing" and "--num-kv-tokens" in found["memory"].remedy
    assert cpu_features(tmp_path) == []


def make_smi(directory: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=":")


def test_gpus_are_those_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_smi(tmp_path, "echo 'NVIDIA H200, 9.0, 570.1, 143771, 143000'", monkeypatch)
    (finding,) = describe_gpus(driver_gpus())
    assert finding.name == "GPU 0"
    assert finding.value == "NVIDIA H200, compute capability 9.0, 143000 of 143771 MiB free, driver 570.1"


@pytest.mark.parametrize("script", ["exit 9", "echo nonsense"])
def test_a_driver_that_fails_has_no_gpus(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_smi(tmp_path, script, monkeypatch)
    assert driver_gpus() == []
    assert describe_gpus([])[0].value == "none that nvidia-smi lists"
