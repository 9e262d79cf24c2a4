from math import prod

import torch
from torch import nn

from segue.memory import backing
from segue.memory.arena import ALIGNMENT, SLAB_ALIGNMENT, Arena, Layout, TensorSpec, bind


def spec(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype)


SPECS = [
    spec("a", 3, 5),
    spec("b", 7, dtype=torch.bfloat16),
    spec("c", 2, 3, 4),
    spec("d"),
    spec("e", 0, 4),
]


def layout(specs: list[TensorSpec], slab_bytes: int = 1 << 20) -> Layout:
    return Layout.of(specs, slab_bytes, align=ALIGNMENT)


def filled(specs: list[TensorSpec], slab_bytes: int = 1 << 20) -> Arena:
    arena = Arena.take(layout(specs, slab_bytes), backing.pageable)
    for number, name in enumerate(arena.layout.table):
        arena.view(name).fill_(number + 1)
    return arena


def test_a_layout_has_the_specs_shapes_and_dtypes_in_their_order() -> None:
    table = layout(SPECS).table
    assert list(table) == [s.name for s in SPECS]
    assert [(e.shape, e.dtype) for e in table.values()] == [(s.shape, s.dtype) for s in SPECS]
    assert all(entry.offset % ALIGNMENT == 0 for entry in table.values())


def test_tensors_and_gaps_of_a_layout_are_every_byte_once() -> None:
    for found in (layout(SPECS), layout(SPECS, 512), layout(SPECS, 256), Layout.of(SPECS)):
        counts = [torch.zeros(size, dtype=torch.uint8) for size in found.sizes]
        for entry in found.table.values():
            end = entry.offset + prod(entry.shape) * entry.dtype.itemsize
            counts[entry.slab][entry.offset : end] += 1
        for slab, start, end in found.gaps:
            counts[slab][start:end] += 1
        assert all(bool((count == 1).all()) for count in counts)


def test_slabs_are_multiples_of_two_mebibytes() -> None:
    many = [spec(name, 3 << 18) for name in "abc"]  # 3 MiB each
    assert Layout.of(many, slab_bytes=4 << 20).sizes == [2 * SLAB_ALIGNMENT] * 3
    assert Layout.of(many).sizes == [5 * SLAB_ALIGNMENT]
    assert SLAB_ALIGNMENT == 2 << 20


def test_equal_specs_have_equal_layouts() -> None:
    assert layout(SPECS, 512) == layout(list(SPECS), 512)


def test_small_tensors_share_one_slab() -> None:
    assert len(layout(SPECS).sizes) == 1


def test_a_slab_is_not_filled_beyond_its_size() -> None:
    found = layout([spec(n, 64) for n in "abcde"], slab_bytes=2 * ALIGNMENT)
    assert found.sizes == [2 * ALIGNMENT, 2 * ALIGNMENT, ALIGNMENT]


def test_a_tensor_larger_than_a_slab_gets_its_own() -> None:
    found = layout([spec("a", 8), spec("big", 1000), spec("b", 8)], slab_bytes=1024)
    assert [entry.slab for entry in found.table.values()] == [0, 1, 2]


def test_num_bytes_counts_the_slabs() -> None:
    found = layout(SPECS, 512)
    arena = Arena.take(found, backing.pageable)
    assert found.num_bytes == sum(found.sizes) == arena.num_bytes == 4 * ALIGNMENT
    assert [slab.numel() for slab in arena.slabs] == found.sizes


def test_views_have_the_specs_shape_and_dtype() -> None:
    arena = filled(SPECS)
    assert [(v.shape, v.dtype) for v in map(arena.view, "abcde")] == [(s.shape, s.dtype) for s in SPECS]


def test_views_do_not_overlap() -> None:
    arena = filled(SPECS)
    for number, name in enumerate("abcde"):
        assert bool((arena.view(name) == number + 1).all())


def test_every_view_is_aligned_in_memory() -> None:
    arena = filled(SPECS, slab_bytes=512)
    assert all(arena.view(name).data_ptr() % ALIGNMENT == 0 for name in "abc")


def test_a_view_shares_the_slabs_memory() -> None:
    arena = filled(SPECS)
    for slab in arena.slabs:
        slab.zero_()
    assert not arena.view("c").any()


def test_an_arena_changes_no_memory_until_its_gaps_are_zeroed() -> None:
    found = Layout.of([spec("a", 1), spec("b", 65)])
    arena = Arena.take(found, lambda size: torch.full((size,), 7, dtype=torch.uint8))
    slabs = arena.slabs
    assert [slab.numel() for slab in slabs] == found.sizes and bool((slabs[0] == 7).all())
    used = torch.zeros(arena.num_bytes, dtype=torch.bool)
    for entry in arena.layout.table.values():
        used[entry.offset : entry.offset + 4 * entry.shape[0]] = True
    arena.zero_gaps()
    assert not slabs[0][~used].any() and bool((slabs[0][used] == 7).all())


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
    arena = Arena.take(Layout.of([spec("a", 1 << 21, dtype=torch.int64)]), backing.pageable)
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
