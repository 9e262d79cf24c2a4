"""How the CPU's own kernels are built."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from segue.kernels.cpu import build
from segue.kernels.cpu.build import kernels


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An empty cache on a CPU that can run the kernels, and the variable that names the compiler."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    return monkeypatch


@pytest.mark.parametrize(
    ("command", "told"), [("no-such-compiler", "install g++"), ("false", "exit status 1")]
)
def test_without_a_compiler_there_are_no_kernels(
    compiler: pytest.MonkeyPatch, command: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    compiler.setenv("CXX", command)
    found = build.kernels.__wrapped__()
    assert found.library is None and told in found.why_not
    assert "up to twice as long" in caplog.text


def test_another_cpu_has_no_kernels(compiler: pytest.MonkeyPatch) -> None:
    compiler.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert build.kernels.__wrapped__().why_not == "the CPU has no AVX512-BF16"


@pytest.mark.skipif(kernels().library is None, reason=kernels().why_not)
def test_the_kernels_are_compiled_once(compiler: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert build.kernels.__wrapped__().library is not None
    (made,) = (tmp_path / "segue" / "kernels").iterdir()
    compiler.setenv("CXX", "no-such-compiler")
    assert build.kernels.__wrapped__().library._name == str(made)
