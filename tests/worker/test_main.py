"""What rank 0 tells the frontend at the end of its start."""

from __future__ import annotations

from pathlib import Path

from segue.messages.control import GraphCost
from segue.worker.main import _ready
from tests.model_runner import making, tiny


def test_the_end_of_the_start_names_what_the_graphs_have_cost(tmp_path: Path) -> None:
    tiny.save_llama(tmp_path)
    runner = making.make_runner(tmp_path)
    assert _ready(runner, [], "both", None).graphs == {}, "there are none on a CPU"
    runner.graph_costs = {"decode": GraphCost(num_graphs=1, seconds=0.5, num_bytes=1 << 20)}
    assert _ready(runner, [], "both", None).graphs == runner.graph_costs
    runner.close()
