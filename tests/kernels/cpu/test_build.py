"""How the CPU's own kernels are built."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from segue.kernels.cpu import build
from segue.kernels.cpu.build import kernels
from tests.conftest import WaitUntil


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An empty cache on a CPU that can run the kernels, and the variable that names the compiler."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    return monkeypatch


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("no-such-compiler", "install g++"),
        (" ", "install g++"),
        ("false", "exit status 1"),
        ("sh -c 'echo full >&2; exit 1'", "built: full"),
        ("sh -c 'kill -9 $$'", "SIGKILL"),
    ],
)
def test_without_a_compiler_there_are_no_kernels(
    compiler: pytest.MonkeyPatch, command: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    compiler.setenv("CXX", command)
    found = build.kernels.__wrapped__()
    assert found.library is None and told in found.why_not
    assert "up to twice as long" in caplog.text


def test_a_compiler_that_hangs_is_named_and_killed_with_its_children(
    compiler: pytest.MonkeyPatch, tmp_path: Path, wait_until: WaitUntil
) -> None:
    """The command is a driver; its child, which compiles, has another process id."""
    script, pid = tmp_path / "cxx", tmp_path / "pid"
    script.write_text(
        f"#!/bin/sh\necho wait >&2\nsleep 600 &\necho $! > {pid}.new\nmv {pid}.new {pid}\nwait\n"
    )
    script.chmod(0o755)
    compiler.setenv("CXX", str(script))
    communicate = subprocess.Popen.communicate

    def wait_for_the_child(*args: Any, **kwargs: Any) -> object:
        wait_until(pid.exists)
        return communicate(*args, **kwargs)

    compiler.setattr(subprocess.Popen, "communicate", wait_for_the_child)
    compiler.setattr(build, "_COMPILE_S", 0.1)
    assert "cxx did not end within 0.1 s; set CXX" in build.kernels.__wrapped__().why_not
    child = Path("/proc") / pid.read_text().strip() / "stat"
    wait_until(lambda: not child.exists() or ") Z " in child.read_text(), what="the child is killed, too")


def test_a_cache_that_cannot_be_written_is_named(compiler: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "segue").touch()  # where a directory should be
    found = build.kernels.__wrapped__()
    assert str(tmp_path) in found.why_not and "set XDG_CACHE_HOME" in found.why_not


def test_a_user_without_a_home_has_no_kernels(compiler: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    compiler.delenv("XDG_CACHE_HOME")
    compiler.setattr(Path, "home", home)
    found = build.kernels.__wrapped__()
    assert "home directory" in found.why_not and "set XDG_CACHE_HOME" in found.why_not


def test_a_library_is_on_the_disk_before_it_has_its_name(
    compiler: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "compile").write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; echo done > "$2"\n')
    (tmp_path / "compile").chmod(0o755)
    compiler.setenv("CXX", str(tmp_path / "compile"))
    target, synced = tmp_path / "made" / build._file_name(), list[bool]()
    compiler.setattr(build.os, "fsync", lambda _: synced.append(target.exists()))
    assert build.compile_into(target.parent) == target and target.read_text() == "done\n"
    assert synced == [False]


def test_another_cpu_has_no_kernels(compiler: pytest.MonkeyPatch) -> None:
    compiler.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert build.kernels.__wrapped__().why_not == "the CPU has no AVX512-BF16"


@pytest.mark.skipif(kernels().library is None, reason=kernels().why_not)
def test_the_kernels_are_compiled_once_and_again_if_the_file_is_damaged(
    compiler: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = tmp_path / "segue" / "kernels" / build._file_name()
    made.parent.mkdir(parents=True)
    made.touch()  # as a crash of the machine may leave it
    compiler.setenv("CXX", "c++ -O0")  # which takes less time
    assert build.kernels.__wrapped__().library is not None
    assert [*made.parent.iterdir()] == [made]
    compiler.setenv("CXX", "no-such-compiler")
    assert build.kernels.__wrapped__().library._name == str(made)
