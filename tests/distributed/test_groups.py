import multiprocessing
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
import torch

from segue.distributed.groups import connect
from segue.distributed.info import TPInfo

SIZE = 2


def exchange(rank: int, rendezvous: Path, results: "Queue[tuple[int, Any]]") -> None:
    torch.set_num_threads(1)
    groups = connect(TPInfo(rank, SIZE), rendezvous=rendezvous, device=torch.device("cpu"))
    collectives = groups.collectives
    found: dict[str, Any] = {"all_gather": groups.all_gather([rank, 7])}
    for dtype in (torch.float32, torch.bfloat16):
        mine = torch.full((3,), float(rank + 1), dtype=dtype)
        found[f"all_reduce {dtype}"] = collectives.all_reduce(mine.clone()).tolist()
        gathered = collectives.gather(mine[:2].view(1, 2))
        found[f"gather {dtype}"] = None if gathered is None else gathered.tolist()
    found["broadcast"] = collectives.broadcast(torch.tensor([rank + 5])).tolist()
    groups.barrier()
    found["default group untouched"] = not torch.distributed.is_initialized()
    results.put((rank, found))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    rendezvous = tmp_path_factory.mktemp("groups") / "rendezvous"
    context = multiprocessing.get_context("spawn")
    results: Queue[tuple[int, Any]] = context.Queue()
    ranks = [context.Process(target=exchange, args=(rank, rendezvous, results)) for rank in range(SIZE)]
    for process in ranks:
        process.start()
    try:
        return dict(results.get(timeout=60) for _ in ranks)
    finally:
        for process in ranks:
            process.join(timeout=30)
            process.kill()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_reduce_sums_on_every_rank(found: dict[int, Any], dtype: torch.dtype) -> None:
    assert [found[rank][f"all_reduce {dtype}"] for rank in range(SIZE)] == [[3.0] * 3] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gather_joins_on_the_first_rank_only(found: dict[int, Any], dtype: torch.dtype) -> None:
    assert found[0][f"gather {dtype}"] == [[1.0, 1.0, 2.0, 2.0]]
    assert found[1][f"gather {dtype}"] is None


def test_broadcast_gives_the_first_ranks_values(found: dict[int, Any]) -> None:
    assert found[0]["broadcast"] == found[1]["broadcast"] == [5]


def test_all_gather_of_integers_is_ordered_by_rank(found: dict[int, Any]) -> None:
    assert found[0]["all_gather"] == found[1]["all_gather"] == [[0, 7], [1, 7]]


def test_the_default_process_group_is_left_alone(found: dict[int, Any]) -> None:
    assert found[0]["default group untouched"]


def test_a_group_of_one_exchanges_nothing() -> None:
    groups = connect(TPInfo(0, 1), rendezvous=Path("/nonexistent/rendezvous"), device=torch.device("cpu"))
    tensor = torch.ones(2)
    assert groups.all_gather([4]) == [[4]]
    assert groups.collectives.all_reduce(tensor) is tensor
    assert groups.collectives.gather(tensor) is tensor
