import torch
from torch import nn

from segue.memory.arena import ALIGNMENT, Arena, TensorSpec, bind


def spec(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype)


SPECS = [
    spec("a", 3, 5),
    spec("b", 7, dtype=torch.bfloat16),
    spec("c", 2, 3, 4),
    spec("d"),
    spec("e", 0, 4),
]


def filled(specs: list[TensorSpec], slab_bytes: int = 1 << 20) -> Arena:
    arena = Arena.allocate(specs, "cpu", slab_bytes)
    for number, name in enumerate(arena.table):
        arena.view(name).fill_(number + 1)
    return arena


def test_views_have_the_specs_shape_and_dtype() -> None:
    arena = Arena.allocate(SPECS, "cpu")
    assert [(v.shape, v.dtype) for v in map(arena.view, "abcde")] == [(s.shape, s.dtype) for s in SPECS]


def test_views_do_not_overlap() -> None:
    arena = filled(SPECS)
    for number, name in enumerate("abcde"):
        assert bool((arena.view(name) == number + 1).all())


def test_every_view_is_aligned_in_memory() -> None:
    arena = Arena.allocate(SPECS, "cpu", slab_bytes=512)
    assert all(arena.view(name).data_ptr() % ALIGNMENT == 0 for name in "abc")


def test_a_view_shares_the_slabs_memory() -> None:
    arena = filled(SPECS)
    for slab in arena.slabs:
        slab.zero_()
    assert not arena.view("c").any()


def test_small_tensors_share_one_slab() -> None:
    assert len(Arena.allocate(SPECS, "cpu").slabs) == 1


def test_a_slab_is_not_filled_beyond_its_size() -> None:
    arena = Arena.allocate([spec(n, 64) for n in "abcde"], "cpu", slab_bytes=2 * ALIGNMENT)
    assert [slab.numel() for slab in arena.slabs] == [2 * ALIGNMENT, 2 * ALIGNMENT, ALIGNMENT]


def test_a_tensor_larger_than_a_slab_gets_its_own() -> None:
    arena = Arena.allocate([spec("a", 8), spec("big", 1000), spec("b", 8)], "cpu", slab_bytes=1024)
    assert [entry.slab for entry in arena.table.values()] == [0, 1, 2]


def test_num_bytes_counts_the_slabs() -> None:
    arena = Arena.allocate(SPECS, "cpu", slab_bytes=512)
    assert arena.num_bytes == sum(slab.numel() for slab in arena.slabs) == 4 * ALIGNMENT


def test_gaps_are_zero() -> None:
    arena = filled([spec("a", 1), spec("b", 65)])
    used = torch.zeros(arena.num_bytes, dtype=torch.bool)
    for entry in arena.table.values():
        used[entry.offset : entry.offset + 4 * entry.shape[0]] = True
    assert not arena.slabs[0][~used].any()


def test_checksum_is_one_number_per_slab_and_repeatable() -> None:
    arenas = [filled(SPECS, slab_bytes=256) for _ in range(2)]
    assert arenas[0].checksum() == arenas[1].checksum()
    assert len(arenas[0].checksum()) == len(arenas[0].slabs)


def test_checksum_sees_one_changed_bit() -> None:
    arena = filled([spec("a", 1000)])
    before = arena.checksum()
    arena.slabs[0][2003] ^= 0x80
    assert arena.checksum() != before


def test_checksum_sees_two_words_swapped() -> None:
    arena = Arena.allocate([spec("a", 1 << 21, dtype=torch.int64)], "cpu")
    view = arena.view("a").fill_(7)
    view[0], view[1 << 20] = 1 << 62, 1 << 61
    before = arena.checksum()
    view[0], view[1 << 20] = 1 << 61, 1 << 62
    assert arena.checksum() != before


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4, bias=False))
        self.inner[1].weight = self.embed.weight


def bound() -> tuple[Tied, Arena]:
    with torch.device("meta"):
        model = Tied()
    specs = [spec(name, *parameter.shape) for name, parameter in model.named_parameters()]
    arena = filled(specs)
    bind(model, arena)
    return model, arena


def test_bind_replaces_meta_parameters_by_views() -> None:
    model, arena = bound()
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == arena.view(name).data_ptr()
        assert not parameter.requires_grad


def test_bind_keeps_tied_parameters_tied() -> None:
    model, _ = bound()
    assert model.inner[1].weight is model.embed.weight
