"""A rank that gives memory back goes on with its loop meanwhile, however long that takes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

from segue.messages.memory import MapMemory, MemoryMoved, UnmapMemory
from segue.worker.released_memory import ReleasedMemory
from tests.conftest import WaitUntil


class SlowMemory:
    """Memory of a GPU whose copies do not end until they may."""

    device = torch.device("cuda")

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.moves: list[str] = []

    def unmap(self, tag: str, *, backup: bool) -> int:
        assert self.may_end.wait(60), "the loop was held up"
        self.moves.append(f"unmap {tag}")
        return 5

    def map(self, tags: list[str]) -> int:
        self.moves.append(f"map {tags}")
        return 5

    def has_backup(self, tag: str) -> bool:
        return True


def test_a_long_copy_does_not_hold_up_the_loop(wait_until: WaitUntil) -> None:
    memory, sent = SlowMemory(), list[MemoryMoved]()
    served: Any = SimpleNamespace(tp=SimpleNamespace(rank=3), note_lost=lambda: None)

    def submit(work: Any) -> Any:  # as `CUDAStream` does
        raise AssertionError("on CUDA this would run it on the loop's thread")

    served.submit = submit
    with ThreadPoolExecutor(1) as thread:
        rank = ReleasedMemory(memory, SimpleNamespace(), served, thread.submit, sent.append)  # type: ignore[arg-type]
        rank.handle(UnmapMemory(call=1, tags=["weights"], backup=True))
        rank.handle(MapMemory(call=2, tags=["weights"]))
        assert sent == [] == memory.moves
        memory.may_end.set()
        wait_until(lambda: len(sent) == 2, what="both answers")
    assert [(each.rank, each.call, each.errors) for each in sent] == [(3, 1, []), (3, 2, [])]
    assert memory.moves == ["unmap weights", "map ['weights']"]
