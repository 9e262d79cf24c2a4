"""Which GPUs and cores the workers of a cluster get."""

from __future__ import annotations

import sys

import pytest

from segue.cluster.devices import list_gpus, share_gpus, threads_per_rank, visible_gpus
from segue.errors import DeviceCountError

LISTING = """\
GPU 0: NVIDIA H200 (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 1g.18gb     Device  0: (UUID: MIG-11111111-2222-3333-4444-555555555555)
GPU 1: NVIDIA H200 (UUID: GPU-27e4f4f2-0000-4c3f-a1b2-0123456789ab)
"""
IDS = ["GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77", "GPU-27e4f4f2-0000-4c3f-a1b2-0123456789ab"]


def listing(text: str, code: int = 0) -> list[str]:
    return [sys.executable, "-c", f"print({text!r}, end=''); raise SystemExit({code})"]


def test_the_drivers_tool_lists_the_gpus() -> None:
    assert list_gpus({}, listing(LISTING)) == IDS


@pytest.mark.parametrize(
    "command", [listing("No devices were found\n"), listing(LISTING, 9), ["/no/such/tool"]]
)
def test_without_a_driver_there_are_no_gpus(command: list[str]) -> None:
    assert list_gpus({}, command) == []
    assert list_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, command) == []


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("1,0", ["1", "0"]), (" 1 ", ["1"]), ("", []), ("-1", []), ("GPU-5d5b", ["GPU-5d5b"])],
)
def test_the_users_choice_of_gpus_is_obeyed(visible: str, expected: list[str]) -> None:
    assert list_gpus({"CUDA_VISIBLE_DEVICES": visible}, listing(LISTING)) == expected


def test_each_worker_gets_gpus_of_its_own() -> None:
    assert share_gpus(list("abcdef"), "auto", 2, 3) == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert share_gpus(list("abcd"), "cuda", 1, 2) == [["a"], ["b"]]


@pytest.mark.parametrize(("device", "gpus"), [("cpu", ["a", "b"]), ("auto", [])])
def test_workers_on_the_cpu_get_none(device: str, gpus: list[str]) -> None:
    assert share_gpus(gpus, device, 1, 2) == [[], []]  # type: ignore[arg-type]


@pytest.mark.parametrize(("device", "gpus"), [("cuda", []), ("auto", ["a", "b", "c"])])
def test_too_few_gpus_are_an_error_with_both_numbers(device: str, gpus: list[str]) -> None:
    text = rf"2 workers with --tp 2 need 4 GPUs, and {len(gpus)} can be used; start fewer workers"
    with pytest.raises(DeviceCountError, match=text):
        share_gpus(gpus, device, 2, 2)  # type: ignore[arg-type]


def test_a_worker_sees_its_own_gpus_first_and_its_peers_behind() -> None:
    shares = [["a", "b"], ["c", "d"], ["e", "f"]]
    assert visible_gpus(shares, 1, sees_peers=True) == ["c", "d", "a", "b", "e", "f"]
    assert visible_gpus(shares, 1, sees_peers=False) == ["c", "d"]


@pytest.mark.parametrize(("cores", "tp", "workers", "threads"), [(16, 2, 2, 4), (2, 1, 2, 1), (2, 2, 3, 1)])
def test_all_ranks_share_the_cores(cores: int, tp: int, workers: int, threads: int) -> None:
    assert threads_per_rank(cores, tp, workers) == threads
