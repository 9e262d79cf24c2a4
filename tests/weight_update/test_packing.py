"""New weights are packed for the layers before the pause of their commit, and not in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save

from segue.kernels.cpu import ops as cpu
from segue.kernels.cpu.build import kernels
from segue.layers import blocks
from segue.layers.blocks import Linear
from segue.messages.weight_update import AdoptGeneration, Commit, Discard, FetchGeneration, Load, Take
from segue.weight_update import packing
from tests.checkpoint import tiny
from tests.weight_update.test_rank import QKV, assert_same, checkpoint
from tests.weight_update.updating import Rank, rank_of

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def copies(monkeypatch: Patch) -> None:
    """The CPU is one whose GEMMs are oneDNN's, by copies of the weights."""
    monkeypatch.setattr(cpu, "usable", lambda x: False)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    with rank_of(checkpoint("llama-tied", tmp_path / "old", 0)[0]) as rank:
        yield rank


def noted(monkeypatch: Patch, before: Callable[[], None] = lambda: None) -> list[str]:
    """Return the names of the threads that pack from now on, one per copy of a weight."""
    pack, threads = blocks.pack, list[str]()

    def note(*args: Any, **options: Any) -> Any:
        before()
        packed = pack(*args, **options)
        if packed is not None and packed.num_bytes:
            threads.append(threading.current_thread().name)
        return packed

    monkeypatch.setattr(blocks, "pack", note)
    return threads


def num_layers(rank: Rank) -> int:
    """Return the number of layers that keep packed copies."""
    layers = [module for module in rank.model.modules() if isinstance(module, Linear)]
    return sum(layer.packed is not None and layer.packed.num_bytes > 0 for layer in layers)


def test_a_commit_swaps_what_was_packed_before_between_two_steps(
    rank: Rank, tmp_path: Path, monkeypatch: Patch
) -> None:
    new, _ = checkpoint("llama-tied", tmp_path / "new", 1)
    threads, queued, submit = noted(monkeypatch), [0], rank.served.submit

    def counted(work: Any) -> Any:
        queued[0] += 1
        return submit(work)

    object.__setattr__(rank.served, "submit", counted)
    rank.do(Load, session=1, model_path=str(new), load_format="auto")
    assert len(threads) == num_layers(rank) >= 4
    assert {name.partition("_")[0] for name in threads} == {"segue-stream"}, "where steps run"
    assert queued[0] >= len(threads), "steps may run between any two layers"
    threads.clear()
    rank.do(Commit, session=1)
    assert not threads
    assert_same(rank, new)


@pytest.mark.parametrize("own", [False, True])
def test_steps_wait_for_no_layer_that_keeps_no_copy(
    rank: Rank, tmp_path: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture, own: bool
) -> None:
    if own and kernels().library is None:
        pytest.skip(kernels().why_not)
    if own:
        monkeypatch.setattr(cpu, "usable", lambda x: x.dtype == torch.bfloat16)
        rank.model.build_derived()
    assert own == (num_layers(rank) == 0)
    new, _ = checkpoint("llama-tied", tmp_path / "new", 1)
    queued = [0]

    def count(result: object) -> object:
        queued[0] += 1
        return result

    packed = packing._result_or_error
    monkeypatch.setattr(packing, "_result_or_error", lambda work: count(packed(work)))
    monkeypatch.setattr(packing, "free_cpu_memory", lambda: 1000 if own else 1 << 40)
    with caplog.at_level("INFO"):
        rank.do(Load, session=1, model_path=str(new), load_format="auto")
    assert queued[0] == num_layers(rank) and "packed in the pause" not in caplog.text
    rank.do(Commit, session=1)
    assert_same(rank, new)


def test_without_memory_for_second_copies_the_commit_packs(
    rank: Rank, tmp_path: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    new, _ = checkpoint("llama-tied", tmp_path / "new", 1)
    threads = noted(monkeypatch)
    monkeypatch.setattr(packing, "free_cpu_memory", lambda: 1000)
    with caplog.at_level("INFO"):
        rank.do(Load, session=1, model_path=str(new), load_format="auto")
    assert not threads and "packed in the pause of their commit" in caplog.text
    rank.do(Commit, session=1)
    assert len(threads) == num_layers(rank) > 0
    assert_same(rank, new)


def test_copies_of_weights_in_fp8_take_the_memory_of_their_values(
    tmp_path: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    (old, _), (new, _) = (checkpoint("llama-tied", tmp_path / name, seed) for seed, name in enumerate("ab"))
    with rank_of(old, quantization="fp8") as rank:
        views = [rank.served.arena.view(name) for name in rank.served.arena.layout.table]
        in_fp8, values = sum(view.nbytes for view in views), 2 * sum(view.numel() for view in views)
        monkeypatch.setattr(packing, "free_cpu_memory", lambda: (in_fp8 + values) // 2)
        with caplog.at_level("INFO"):
            rank.do(Load, session=1, model_path=str(new), load_format="auto")
        assert in_fp8 < values and "packed in the pause of their commit" in caplog.text
        rank.do(Commit, session=1)
        assert_same(rank, new, "fp8")


def test_an_error_before_the_commit_leaves_the_rest_to_it(
    rank: Rank, tmp_path: Path, monkeypatch: Patch
) -> None:
    new, _ = checkpoint("llama-tied", tmp_path / "new", 1)
    fails = iter([False, False, True])

    def before() -> None:
        if next(fails, False):
            raise RuntimeError("no memory")

    threads = noted(monkeypatch, before)
    rank.do(Load, session=1, model_path=str(new), load_format="auto")
    assert 1 <= len(threads) <= 2, "the head keeps a copy only where oneDNN multiplies by it"
    rank.do(Commit, session=1)
    assert len(threads) == num_layers(rank)
    assert_same(rank, new)


def test_what_is_staged_again_is_packed_again(rank: Rank, tmp_path: Path, monkeypatch: Patch) -> None:
    new, _ = checkpoint("llama-tied", tmp_path / "new", 1)
    rank.do(Load, session=1, model_path=str(new), load_format="auto")
    threads = noted(monkeypatch)
    name = QKV.format("q")
    values = torch.randn(rank.served.weight_map.shapes[name]).to(torch.bfloat16)
    rank.do(Take, session=1, payload=save({name: values}), copy=True)
    assert len(threads) == 1
    rank.do(Commit, session=1)
    assert len(threads) == 1
    layer = rank.model.get_submodule("layers.0.attn.qkv")
    assert torch.equal(layer.weight[: len(values)], values)
    x = torch.randn(3, values.shape[1]).to(torch.bfloat16)
    assert torch.equal(layer(x), blocks.pack(layer.weight)(x, layer.bias))


def test_an_engine_that_follows_packs_before_it_adopts(
    rank: Rank, tmp_path: Path, monkeypatch: Patch
) -> None:
    new, _ = checkpoint("llama-tied", tmp_path / "new", 1)
    arena, served = tiny.load(new, dtype=torch.bfloat16)[1], rank.served.arena

    def adopt() -> None:
        for mine, theirs in zip(served.slabs, arena.slabs, strict=True):
            mine.copy_(theirs)

    fetched = SimpleNamespace(
        arena=arena, parameters=set(arena.layout.table), adopt=adopt, release=lambda: None
    )
    shared: Any = SimpleNamespace(fetch=lambda number: fetched, number=2, name="2")
    monkeypatch.setattr(rank.served.memory, "generations", shared)
    threads = noted(monkeypatch)
    rank.do(FetchGeneration, generation=2)
    assert len(threads) == num_layers(rank)
    threads.clear()
    assert rank.do(AdoptGeneration)["generation"] == (2, "2")
    assert not threads
    assert_same(rank, new)


def test_a_generation_that_is_fetched_before_the_last_one_is_given_up_stays(
    rank: Rank, monkeypatch: Patch
) -> None:
    released = list[int]()

    def fetch(number: int) -> Any:
        release = partial(released.append, number)
        return SimpleNamespace(arena=rank.served.arena, parameters=set(), adopt=lambda: None, release=release)

    shared: Any = SimpleNamespace(fetch=fetch, number=2, name="2")
    monkeypatch.setattr(rank.served.memory, "generations", shared)
    rank.do(FetchGeneration, generation=2)
    late = list[Callable[[], object]]()
    with monkeypatch.context() as patched:
        patched.setattr(rank.updater, "_start", late.append)
        rank.do(AdoptGeneration)
        rank.stream.submit(lambda: None).result()  # the callbacks of the work before have run then
    rank.do(FetchGeneration, generation=3)
    late.pop()()
    assert released == [2]
    rank.do(AdoptGeneration)


def test_a_discarded_session_leaves_the_served_copies(rank: Rank, tmp_path: Path) -> None:
    new, _ = checkpoint("llama-tied", tmp_path / "new", 1)
    rank.do(Load, session=1, model_path=str(new), load_format="auto")
    rank.do(Discard, session=1)
    assert_same(rank, tmp_path / "old")
