"""Private memory: a filler gets the arena that is returned, when it asks for it."""

import os
from collections.abc import Callable

import torch
from torch import Tensor

from segue.memory import shared
from segue.memory.arena import Arena, Layout, TensorSpec
from segue.memory.rank_memory import Place, PrivateMemory, SharedKVMemory

LAYOUT = Layout.of([TensorSpec(name="w", shape=(5,), dtype=torch.float32)])
PLACES: tuple[Place, ...] = ("device", "host")


def test_a_filler_gets_the_arena_that_is_returned() -> None:
    seen: list[Arena] = []

    def fill(take: Callable[[], Arena]) -> None:
        seen.extend([take(), take()])
        seen[0].view("w").fill_(3)

    arena = PrivateMemory(torch.device("cpu")).load(LAYOUT, fill)
    assert seen == [arena, arena]
    assert arena.view("w").tolist() == [3.0] * 5


def test_what_a_filler_checks_first_takes_no_memory() -> None:
    taken: list[int] = []
    memory = PrivateMemory(torch.device("cpu"))
    take_slab = memory._take

    def counting(num_bytes: int) -> Tensor:
        taken.append(num_bytes)
        return take_slab(num_bytes)

    def fill(take: Callable[[], Arena]) -> None:
        assert taken == []
        take()

    memory._take = counting
    memory.load(LAYOUT, fill)
    assert taken == LAYOUT.sizes


def test_kv_memory_is_zero_and_staged_arenas_have_the_layout() -> None:
    memory = PrivateMemory(torch.device("cpu"))
    assert memory.take_kv(100).tolist() == [0] * 100
    for place in PLACES:
        arena = memory.stage(LAYOUT, place)
        assert [slab.numel() for slab in arena.slabs] == LAYOUT.sizes
        memory.release(arena, place)


def test_shared_kv_memory_is_zero_and_can_be_mapped_by_others() -> None:
    memory = SharedKVMemory(torch.device("cpu"))
    kv = memory.take_kv(5000)
    assert memory.kv_descriptor is not None and kv.shape == (5000,) and not kv.any()
    other = torch.frombuffer(shared.map_shared(memory.kv_descriptor, 5000), dtype=torch.uint8)
    other[4999] = 7
    assert kv[4999] == 7
    os.close(memory.kv_descriptor)


def test_only_the_kv_of_shared_memory_is_shared() -> None:
    memory = PrivateMemory(torch.device("cpu"))
    memory.take_kv(100)
    assert memory.kv_descriptor is None
    arena = SharedKVMemory(torch.device("cpu")).stage(LAYOUT, "device")
    assert [slab.numel() for slab in arena.slabs] == LAYOUT.sizes
