"""The grid: which sizes exist, and which one a step of prompts takes."""

from segue.messages.steps import StepPlan
from segue.model_runner.graphs import MAX_PADDING
from segue.model_runner.grid import choose, grid_sizes

GRID = grid_sizes([1, 2, 4, 8], [16, 32, 64, 128, 256], max_len=256, rows=256, tokens=8448)


def prompts(lens: list[int]) -> StepPlan:
    count = len(lens)
    columns = list(range(count)), [0] * count, lens, [1] * count, [True] * count
    return StepPlan(1, [], [], 0, *columns, "plain")


def test_the_smallest_grid_size_that_fits_is_chosen() -> None:
    for sequences in range(1, 9):
        for max_len in range(1, 257):
            found = choose(GRID, prompts([max_len] * sequences))
            fitting = [(n, length) for n, length in GRID if n >= sequences and length >= max_len]
            smallest = min(n * length for n, length in fitting)
            if found is None:
                assert smallest > MAX_PADDING * sequences * max_len
            else:
                assert found.kind == "grid" and found.size in fitting and found.tokens == smallest
    assert choose(GRID, prompts([16] * 9)) is None and choose(GRID, prompts([257])) is None
    assert choose([], prompts([16])) is None


def test_the_grid_has_only_sizes_that_the_runner_can_run() -> None:
    assert grid_sizes([1, 4, 8], [16, 64, 256], max_len=64, rows=4, tokens=128) == [(1, 16), (1, 64), (4, 16)]
