"""Ranks that get their weights from a real memory service."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from segue.checkpoint.source import resolve
from segue.distributed.collectives import Collectives
from segue.distributed.groups import TPGroups, connect
from segue.distributed.info import TPInfo
from segue.errors import MemoryServiceError, ModelFileError, WeightsMismatchError
from segue.gms.client_connection import GmsTarget
from segue.memory.arena import Arena, Layout, TensorSpec
from segue.memory.geometry import KVGeometry
from segue.memory.rank_memory import SharedKVMemory
from segue.memory.releasable import ReleasableMemory
from segue.model_runner.service_memory import ServiceMemory
from segue.model_runner.service_start import identity_of
from tests.gms import running as gms

CPU = torch.device("cpu")
LAYOUT = Layout.of(
    [TensorSpec(name=f"t{n}", shape=(300_000,), dtype=torch.float32) for n in range(3)], slab_bytes=2 << 20
)
Take = Callable[[], Arena]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    found = tmp_path_factory.mktemp("gms") / "d"
    with gms.running(found):
        yield found


@pytest.fixture
def make(tiny_model: Path) -> Iterator[Callable[..., ServiceMemory]]:
    source, made = resolve(str(tiny_model), "dummy", "/nonexistent"), []

    def new(directory: Path, cohort: str, groups: TPGroups | None = None, **fields: Any) -> ServiceMemory:
        groups = groups or TPGroups(TPInfo(rank=0, size=1), Collectives(TPInfo(rank=0, size=1)))
        dtype = fields.pop("dtype", torch.float32)
        seed = fields.pop("seed", sum(map(ord, cohort)))  # else a cohort would find another one's weights
        target = GmsTarget(
            directory=str(directory), cohort=cohort, rank=groups.tp.rank, size=groups.tp.size, connect_s=5.0
        )
        kv = fields.pop("kv", None)
        memory = ServiceMemory(
            CPU,
            replace(target, **fields),
            "rw_or_ro",
            groups,
            lambda layout: identity_of(source, layout, groups.tp, dtype, seed=seed),
            kv=kv,
        )
        made.append(memory)
        return memory

    yield new
    for each in made:
        each.close()


def ones(take: Take) -> None:
    for slab in take().slabs:
        slab.fill_(1)


def unwanted(take: Take) -> None:
    raise AssertionError("weights that are there are loaded again")


def test_what_one_engine_has_filled_another_one_reads(directory: Path, make: Callable[..., Any]) -> None:
    first = make(directory, "plain").load(LAYOUT, ones)
    second = make(directory, "plain").load(LAYOUT, unwanted)
    assert len(LAYOUT.sizes) > 1 and [each.shape for each in second.slabs] == [
        each.shape for each in first.slabs
    ]
    assert all(bool((slab == 1).all()) for slab in (*first.slabs, *second.slabs))


def test_when_a_load_fails_an_engine_that_waits_loads(directory: Path, make: Callable[..., Any]) -> None:
    def fails(take: Take) -> None:
        take()
        with gms.target(directory, tag="watch") as client:
            gms.until(lambda: len(client.status()["waiting"]) == 1, "the other engine waits")
        raise ModelFileError("a file is corrupt")

    with ThreadPoolExecutor(1) as pool:
        began: list[Any] = []

        def begin_other(take: Take) -> None:
            began.append(pool.submit(make(directory, "fails").load, LAYOUT, ones))
            fails(take)

        with pytest.raises(ModelFileError, match="corrupt"):
            make(directory, "fails").load(LAYOUT, begin_other)
        assert bool((began[0].result(gms.DEADLINE_S).slabs[0] == 1).all())


def test_a_service_that_ends_during_the_load_is_named(tmp_path: Path, make: Callable[..., Any]) -> None:
    with gms.running(tmp_path / "d") as service:

        def fill(take: Take) -> None:
            ones(take)
            gms.end(service, signal.SIGKILL)

        with pytest.raises(MemoryServiceError, match=str(tmp_path)) as caught:
            make(tmp_path / "d", "lost").load(LAYOUT, fill)
        assert caught.value.code == "lost"


def test_other_bytes_than_the_loader_wrote_are_refused(
    directory: Path, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Arena.checksum
    monkeypatch.setattr(Arena, "checksum", lambda arena: tuple(each ^ 1 for each in right(arena)))
    make(directory, "damaged").load(LAYOUT, ones)
    monkeypatch.undo()
    with pytest.raises(MemoryServiceError, match="slab 0 of generation"):
        make(directory, "damaged").load(LAYOUT, unwanted)


def in_two_ranks(
    directory: Path, run_dir: Path, make: Callable[..., Any], fill: Any, **fields: Any
) -> list[Any]:
    """Load in two ranks of an engine; returns what each has got, or its error."""
    run_dir.mkdir()

    def load(rank: int) -> Any:
        groups = connect(TPInfo(rank=rank, size=2), rendezvous=run_dir / "rendezvous", device=CPU)
        try:
            return make(directory, "ranks", groups, **fields).load(LAYOUT, fill)
        except MemoryServiceError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(load, range(2)))


def test_all_ranks_get_the_weights_or_the_reason(
    directory: Path, tmp_path: Path, make: Callable[..., Any]
) -> None:
    for number, fill in enumerate((ones, unwanted)):
        for arena in in_two_ranks(directory, tmp_path / str(number), make, fill):
            assert bool((arena.slabs[0] == 1).all())
    errors = in_two_ranks(directory, tmp_path / "other", make, unwanted, dtype=torch.bfloat16)
    assert isinstance(errors[0], WeightsMismatchError) and errors[0].param == "dtype"
    for error in errors:
        assert "dtype is 'float32', and this engine has 'bfloat16'" in error.message


def test_the_first_engines_sizes_of_the_kv_cache_hold_until_the_last_engine_has_ended(
    directory: Path, tmp_path: Path, make: Callable[..., Any]
) -> None:
    sizes = KVGeometry.of([100, 16, 1000, 1600, 8, 512])
    others = replace(sizes, num_pages=70)

    def in_rank(rank: int) -> list[KVGeometry | None]:
        groups = connect(TPInfo(rank=rank, size=2), rendezvous=tmp_path / "rendezvous", device=CPU)
        memory = make(directory, "sizes", groups)
        return [memory.pinned_kv(), memory.pin_kv(sizes), memory.pinned_kv()]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(in_rank, range(2))) == [[None, sizes, sizes]] * 2
    second = make(directory, "sizes")
    assert second.pinned_kv() == sizes and second.pin_kv(others) == sizes
    assert make(directory, "other sizes").pin_kv(others) == others


def test_a_rank_that_hands_kv_over_has_a_kv_cache_that_others_can_map(
    directory: Path, make: Callable[..., Any]
) -> None:
    for kv in (None, SharedKVMemory(CPU)):
        memory = make(directory, "kv", kv=kv)
        assert memory.take_kv(1 << 20).numel() == 1 << 20
        assert (memory.kv_descriptor is not None) == (kv is not None)


def test_an_engine_that_stands_by_takes_its_kv_cache_when_it_wakes(
    directory: Path, make: Callable[..., Any]
) -> None:
    kv = ReleasableMemory(CPU, parks_kv=True)
    memory = make(directory, "parked", kv=kv)
    memory.take_kv(8 << 20, scratch_bytes=1 << 20)
    assert mapped_kv(kv) < 8 << 20
    memory.wake()
    assert mapped_kv(kv) == 8 << 20
    memory.close()
    assert not kv._ranges


def mapped_kv(memory: ReleasableMemory) -> int:
    return memory._ranges["kv_cache"].window.mapped_bytes


def test_a_file_that_is_replaced_makes_other_weights(tmp_path: Path, tiny_model: Path) -> None:
    config = (tiny_model / "config.json").read_bytes()
    (tmp_path / "config.json").write_bytes(config)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"a")
    found, tp = [], TPInfo(rank=0, size=1)
    for text in (b"b", b"c"):
        source = resolve(str(tmp_path), "safetensors", "/nonexistent")
        found.append(identity_of(source, LAYOUT, tp, torch.float32))
        file.rename(tmp_path / f"old-{text.decode()}")
        file.write_bytes(text)
    assert found[0].source != found[1].source and replaced(found[0]) == replaced(found[1])


def replaced(identity: Any) -> Any:
    return [getattr(identity, name) for name in identity.__struct_fields__ if name != "source"]
