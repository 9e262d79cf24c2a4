"""All eight combinations of the three levels of length-aware prefill give the same tokens, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import laps_levels
from tests.e2e.laps_levels import ALL, ENGINES, NONE, Levels
from tests.e2e.served import Served, serve

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

Pairs = dict[Levels, Sequence[Served]]
FEW_GRAPHS = {  # so that eight engines start within a minute or two
    "precompile_bs_paddings": "8",
    "precompile_token_paddings": "64",
    "batch_prefill_batch_sizes": "1,2,4",
    "batch_prefill_seq_lengths": "16,64",
}


def words(options: dict[str, Any]) -> list[str]:
    """Returns options as a command line has them."""
    found: list[str] = []
    for name, value in options.items():
        found += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return found


@pytest.fixture(scope="module")
def pairs(tiny_model: Path) -> Iterator[Pairs]:
    """Two engines per combination of the levels that engines have; all of them share one GPU.

    They are processes, because a process that captures graphs must not launch anything else meanwhile. They
    start one after the other, because each one measures the memory that its graphs take.
    """
    common = {"model": tiny_model, "load_format": "dummy", "device": "cuda", "dtype": "bfloat16"}
    with ExitStack() as stack:
        yield {
            levels: [
                stack.enter_context(serve(*words(common | FEW_GRAPHS | levels.engine_options)))
                for _ in range(2)
            ]
            for levels in ENGINES
        }


@pytest.fixture(scope="module")
def expected(pairs: Pairs) -> list[Any]:
    with laps_levels.routed(pairs[NONE], NONE) as url:
        return laps_levels.replies(url, 300)


@pytest.mark.parametrize("levels", ALL[1:], ids=str)
def test_every_combination_of_levels_gives_the_same_tokens(
    pairs: Pairs, expected: list[Any], levels: Levels
) -> None:
    engines = pairs[laps_levels.engines_of(levels)]
    with laps_levels.routed(engines, levels) as url:
        assert laps_levels.replies(url, 300) == expected
    for state in laps_levels.states(engines):
        assert state["num_generated_tokens"] > 0, "both engines have worked"
        assert (state["graph_hit_by_kind"].get("grid", 0) > 0) is levels.graphs
        assert (state["laps"] is not None) is levels.scheduler
        assert not levels.scheduler or sum(state["laps"]["picks"].values()) > 0
