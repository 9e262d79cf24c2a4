"""Runs the ranks of a tensor-parallel group as processes, each with the same plans on its own runner."""

from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from segue.distributed.info import TPInfo
from segue.model_runner.runner import ModelRunner
from tests.model_runner.making import make_runner, prompt
from tests.model_runner.planner import Planner

SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 3}
FULL: dict[str, Any] = {
    **SAMPLED,
    "top_p": 0.95,
    "top_k": 60,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "logprobs": 2,
    "prompt_logprobs_start": 1,
    "num_prompt_top": 2,
}


def scenario(runner: ModelRunner) -> list[list[int]]:
    """Return tokens of greedy and sampled requests: alone, chunked, batched, and in mixed steps."""
    planner = Planner(runner)
    alone = [planner.generate(prompt(n, seed=n), 16, chunk=9) for n in (1, 30)]
    batch = [planner.add(prompt(n, seed=n), **params) for n, params in ((5, {}), (8, SAMPLED), (21, FULL))]
    planner.run([(batch[0], 5), (batch[1], 8)])
    planner.run([(batch[0], 1), (batch[1], 1), (batch[2], 10)])
    planner.run([(batch[0], 1), (batch[1], 1), (batch[2], 11)])
    planner.decode(batch, 16)
    return [sequence.output for sequence in (*alone, *batch)]


def run_ranks(directory: Path, size: int, run_dir: Path) -> list[list[list[int]]]:
    """Return the results of `scenario` on every rank of `size` processes."""
    context = mp.get_context("spawn")
    queue = context.Queue()
    ranks = [
        context.Process(target=_rank, args=(directory, TPInfo(rank, size), run_dir, queue), daemon=True)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    try:
        results = dict(queue.get(timeout=60) for _ in range(size))
        for process in ranks:
            process.join(timeout=30)
        assert [process.exitcode for process in ranks] == [0] * size
        return [results[rank] for rank in range(size)]
    finally:
        for process in ranks:
            process.kill()


def _rank(directory: Path, tp: TPInfo, run_dir: Path, queue: Any) -> None:
    # With LAPS, because all ranks together time some steps at start.
    runner = make_runner(directory, tp, run_dir, enable_laps_scheduler=True)
    queue.put((tp.rank, scenario(runner)))
    runner.close()
