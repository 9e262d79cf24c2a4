"""Why steps cannot be captured, before anything is measured; test_runner.py has the warnings of a start."""

from __future__ import annotations

import pytest

from segue.config import EngineConfig
from segue.model_runner.eager import why_unwanted


@pytest.mark.parametrize(
    ("options", "device", "reason"),
    [
        ({}, "cpu", "a CPU has no CUDA graphs"),
        ({"disable_cuda_graph": True}, "cuda", "--disable-cuda-graph says so"),
        ({}, "cuda", None),
    ],
)
def test_graphs_are_not_tried_on_a_cpu_and_if_they_are_switched_off(
    options: dict[str, bool], device: str, reason: str | None
) -> None:
    assert why_unwanted(EngineConfig(**options), device) == reason  # type: ignore[arg-type]
