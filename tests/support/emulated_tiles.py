"""The CPU's kernels with AMX, whose instructions are emulated, for tests on CPUs without it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory

import pytest

from segue.attention import avx512
from segue.kernels.cpu import build, ops
from segue.kernels.cpu.build import Kernels

HEADER = Path(__file__).with_suffix(".h")


@cache
def emulated() -> Kernels:
    """Compile the kernels with the emulated instructions, and load them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", f"c++ -include {quote(str(HEADER))}")
        with TemporaryDirectory() as directory:
            library = build.load(build.compile_into(Path(directory)))
    return Kernels(library=library, tiles=True)


def use(patch: pytest.MonkeyPatch) -> None:
    """Let the functions of the kernels and of attention use them."""
    found: Callable[[], Kernels] = emulated
    for module in (ops, avx512):
        patch.setattr(module, "kernels", found)
