"""What is compiled for devices that are not there."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import fake_cuda as fake

fake_cuda = fake.fake_cuda


def test_gemms_of_one_token_are_compiled_with_and_without_a_loop(
    fake_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench import compile_kernels
    from segue.kernels.triton import gemv

    launched: list[dict[str, Any]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda **arguments: launched.append(arguments)

    monkeypatch.setattr(gemv, "_gemv", Kernel())
    compile_kernels._gemvs(compile_kernels.facts(90))
    found = {(each["PER_WORD"], each["GATED"], each["SINGLE"]) for each in launched}
    assert found == {(words, gated, single) for words in (1, 4) for gated in (0, 1) for single in (0, 1)}
