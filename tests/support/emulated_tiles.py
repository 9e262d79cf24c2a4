"""The CPU's kernels with AMX, whose instructions are emulated, for tests on CPUs without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from segue.attention import avx512
from segue.kernels.cpu import build, ops
from segue.kernels.cpu.build import Kernels

HEADER = Path(__file__).with_suffix(".h")


@cache
def emulated() -> Kernels:
    """Compile the kernels with the emulated instructions, and load them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", f"c++ -include {HEADER}")
        library = build.compile_into(Path(mkdtemp()))
    return Kernels(library=build.load(library), tiles=True)


def use(patch: pytest.MonkeyPatch) -> None:
    """Let the functions of the kernels and of attention use them."""
    found: Callable[[], Kernels] = emulated
    for module in (ops, avx512):
        patch.setattr(module, "kernels", found)
