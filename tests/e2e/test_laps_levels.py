"""All eight combinations of the three levels of length-aware prefill give the same tokens, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import laps_levels
from tests.e2e.laps_levels import ALL, ENGINES, NONE, Levels
from tests.e2e.served import serve
from tests.server.live import LiveServer

Pairs = dict[Levels, Sequence[LiveServer]]


@pytest.fixture(scope="module")
def pairs(tiny_model: Path) -> Iterator[Pairs]:
    """Two engines per combination of the levels that engines have."""
    with ExitStack() as stack:
        yield {
            levels: [
                stack.enter_context(LiveServer(tiny_model, real=True, device="cpu", **levels.engine_options))
                for _ in range(2)
            ]
            for levels in ENGINES
        }


@pytest.fixture(scope="module")
def expected(pairs: Pairs) -> list[Any]:
    with laps_levels.routed(pairs[NONE], NONE) as url:
        return laps_levels.replies(url, 300)


def combinations() -> Iterator[Any]:
    """Yields the combinations. Graphs have no effect on a CPU: the short run has them in one combination."""
    for levels in ALL[1:]:
        is_redundant = levels.graphs and not (levels.scheduler and levels.groups)
        yield pytest.param(levels, id=str(levels), marks=[pytest.mark.slow] if is_redundant else [])


@pytest.mark.parametrize("levels", list(combinations()))
def test_every_combination_of_levels_gives_the_same_tokens(
    pairs: Pairs, expected: list[Any], levels: Levels
) -> None:
    engines = pairs[laps_levels.engines_of(levels)]
    with laps_levels.routed(engines, levels) as url:
        assert laps_levels.replies(url, 300) == expected
    for state in laps_levels.states(engines):
        assert state["num_generated_tokens"] > 0, "both engines have worked"
        assert state["graph_hit_by_kind"] == {}, "a CPU has no graphs"
        assert (state["laps"] is not None) is levels.scheduler
        assert not levels.scheduler or sum(state["laps"]["picks"].values()) > 0


@pytest.mark.slow  # the line itself: tests/model_runner/test_runner.py
def test_one_line_says_that_graphs_have_no_effect_on_a_cpu(tiny_model: Path, tmp_path: Path) -> None:
    options = ("--model", str(tiny_model), "--load-format", "dummy", "--device", "cpu")
    with (
        (tmp_path / "log").open("w+") as log,
        serve(*options, "--enable-batch-prefill-cuda-graph", log=log),
    ):
        log.seek(0)
        (line,) = [line for line in log if "batch-prefill" in line]
        assert "--enable-batch-prefill-cuda-graph is ignored: it has no effect on a CPU" in line
