"""Updates of weights that a real memory service keeps, on ranks without steps."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from segue.checkpoint.source import resolve
from segue.distributed.collectives import Collectives
from segue.distributed.groups import TPGroups
from segue.distributed.info import TPInfo
from segue.gms.client_connection import GmsTarget
from segue.memory.arena import Layout
from segue.messages.weight_update import (
    AdoptGeneration,
    Commit,
    Discard,
    DropGeneration,
    FetchGeneration,
    FlipGeneration,
    JoinGeneration,
    Load,
    OpenGeneration,
    RenameWeights,
    SealGeneration,
    Take,
)
from segue.model_runner.service_generations import NextGeneration
from segue.model_runner.service_memory import ServiceMemory
from segue.model_runner.service_start import identity_of
from tests.gms import running as gms
from tests.weight_update.test_rank import assert_same, checkpoint
from tests.weight_update.updating import Rank, State, Trainer, manifest_of, rank_of, transfer

CPU = torch.device("cpu")
SMALL = 2 << 20  # bytes: with slabs of this size the model has three
KEY = "model.layers.0.self_attn.k_proj.weight"
NewRank = Callable[..., Rank]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    found = tmp_path_factory.mktemp("gms") / "d"
    with gms.running(found):
        yield found


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return checkpoint("qwen3", tmp_path / "old", 0)[0]


@pytest.fixture
def new(tmp_path: Path) -> tuple[Path, State]:
    return checkpoint("qwen3", tmp_path / "new", 1)


@pytest.fixture
def ranks(old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NewRank]:
    """Makes ranks of engines with one rank each; each test has a cohort of its own."""
    of = Layout.of
    monkeypatch.setattr(
        Layout, "of", lambda specs, slab_bytes=65536, align=SMALL: of(specs, slab_bytes, align)
    )
    with ExitStack() as stack:

        def make(directory: Path, **options: Any) -> Rank:
            return stack.enter_context(sharing(directory, old, tmp_path.name, **options))

        yield make


@contextmanager
def sharing(directory: Path, model: Path, cohort: str, **options: Any) -> Iterator[Rank]:
    source, tp = resolve(str(model), "auto", "/nonexistent"), TPInfo()
    target = GmsTarget(directory=str(directory), cohort=cohort, connect_s=5.0)
    groups = TPGroups(tp, Collectives(tp))
    memory = ServiceMemory(
        CPU, target, "rw_or_ro", groups, lambda layout: identity_of(source, layout, tp, torch.bfloat16)
    )
    with rank_of(model, memory=memory, **options) as rank:
        yield rank
    memory.close()


def begin(rank: Rank, session: int = 1) -> None:
    lease = rank.do(OpenGeneration, session=session)["lease"]
    rank.do(JoinGeneration, session=session, lease=lease)


def commit(rank: Rank, session: int = 1, version: str = "1") -> dict[str, Any]:
    rank.do(SealGeneration, session=session)
    rank.do(FlipGeneration, session=session, version=version)
    return rank.do(Commit, session=session)


def status(directory: Path) -> dict[str, Any]:
    with gms.target(directory, tag="watch") as client:
        return client.status()


def generation_of(rank: Rank) -> int:
    assert rank.served.memory.generations is not None
    return rank.served.memory.generations.number


def test_every_way_to_bring_weights_ends_in_a_generation(
    directory: Path, ranks: NewRank, old: Path, new: tuple[Path, State]
) -> None:
    rank, (path, state) = ranks(directory), new
    trainer = Trainer([rank])
    begin(rank)
    rank.do(Load, session=1, model_path=str(path), load_format="auto")
    commit(rank)
    assert_same(rank, path)
    for session, flattened in ((2, True), (3, False)):
        _, sent = checkpoint("qwen3", old.parent / f"a{session}", session + 5)
        begin(rank, session)
        manifest = manifest_of(sent, flattened=flattened)
        (received,) = transfer([rank], trainer, sent, manifest, session)
        assert received.error is None
        commit(rank, session)
        assert_same(rank, old.parent / f"a{session}")
    begin(rank, 4)
    rank.do(Take, session=4, payload=save(state), copy=False)  # as one that would not be copied
    commit(rank, 4)
    assert_same(rank, path)


def test_a_part_of_the_weights_takes_new_slabs_for_what_it_touches_alone(
    directory: Path, ranks: NewRank
) -> None:
    rank = ranks(directory)
    arena = rank.served.arena
    assert len(arena.slabs) > 2
    before = {name: arena.view(name).clone() for name in arena.layout.table}
    held = status(directory)["devices"]["cpu"]
    number = generation_of(rank)
    begin(rank)
    state = {KEY: torch.randn(rank.served.weight_map.shapes[KEY])}
    rank.do(Take, session=1, payload=save(state), copy=True)
    assert status(directory)["devices"]["cpu"] == held + SMALL, "one slab is new"
    assert all(torch.equal(arena.view(name), values) for name, values in before.items())
    commit(rank)
    (part,) = rank.served.weight_map.slices[KEY]
    before[part.parameter][part.destination] = state[KEY].to(torch.bfloat16)
    for name, expected in before.items():
        assert torch.equal(arena.view(name), expected), name
    assert generation_of(rank) > number
    gms.until(lambda: status(directory)["devices"]["cpu"] == held, "the old slab is given up")


def test_weights_in_fp8_and_their_scales_become_one_generation(
    directory: Path, ranks: NewRank, old: Path, new: tuple[Path, State]
) -> None:
    rank, other = (ranks(directory, quantization="fp8") for _ in range(2))
    begin(rank)
    rank.do(Take, session=1, payload=save({KEY: new[1][KEY]}), copy=False)
    commit(rank)
    other.do(FetchGeneration, generation=generation_of(rank))
    other.do(AdoptGeneration)
    for each in (rank, other):
        packed = each.model.get_submodule("layers.0.attn.qkv").packed
        (part,) = each.served.weight_map.slices[KEY]
        x = torch.eye(each.served.weight_map.shapes[KEY][1], dtype=torch.bfloat16)
        served = packed(x, None).T[part.destination[0]]
        assert torch.equal(served, each.served.destination(part).read().to(torch.bfloat16))
        assert (served - new[1][KEY]).norm() < 0.03 * new[1][KEY].norm()
    assert all(map(torch.equal, rank.served.arena.slabs, other.served.arena.slabs))
    begin(rank, 2)
    rank.do(Take, session=2, payload=save(new[1]), copy=False)
    commit(rank, 2)
    assert_same(rank, new[0], "fp8")


def test_experts_in_fp8_become_one_generation(directory: Path, tmp_path: Path) -> None:
    old, _ = checkpoint("qwen3-moe", tmp_path / "old", 0)
    new, state = checkpoint("qwen3-moe", tmp_path / "new", 1)
    with (
        sharing(directory, old, tmp_path.name, quantization="fp8") as rank,
        sharing(directory, old, tmp_path.name, quantization="fp8") as other,
    ):
        begin(rank)
        rank.do(Take, session=1, payload=save(state), copy=False)
        commit(rank)
        other.do(FetchGeneration, generation=generation_of(rank))
        other.do(AdoptGeneration)
        for each in (rank, other):
            assert_same(each, new, "fp8")


def test_calls_of_one_session_may_come_in_any_order(
    directory: Path, ranks: NewRank, new: tuple[Path, State]
) -> None:
    rank, (path, state) = ranks(directory), new
    table, slices = rank.served.arena.layout.table, rank.served.weight_map.slices
    places = {name: max(table[part.parameter].slab for part in slices[name]) for name in slices}
    late, *others = sorted(state, key=lambda name: places[name], reverse=True)
    begin(rank)
    rank.do(Take, session=1, payload=save({late: state[late]}), copy=True)
    rank.do(Take, session=1, payload=save({others[-1]: state[others[-1]]}), copy=True)
    before = {name: rank.served.arena.view(name).clone() for name in table}
    commit(rank)
    for name in (late, others[-1]):
        for part in slices[name]:
            before[part.parameter][part.destination] = state[name][part.source].to(torch.bfloat16)
    other = ranks(directory)
    for name, expected in before.items():
        for each in (rank, other):
            assert torch.equal(each.served.arena.view(name), expected), name
    begin(rank, 2)
    for start in range(3):
        part = {name: state[name] for name in others[start::3]}
        rank.do(Take, session=2, payload=save(part), copy=True)
    commit(rank, 2)
    assert_same(rank, path)


def test_a_discarded_update_leaves_the_weights_and_gives_its_slabs_up(
    directory: Path, ranks: NewRank, old: Path, new: tuple[Path, State]
) -> None:
    rank, held = ranks(directory), status(directory)["devices"]["cpu"]
    for last in (Take, SealGeneration):
        begin(rank, session := 1 + (last is SealGeneration))
        rank.do(Take, session=session, payload=save(new[1]), copy=True)
        if last is SealGeneration:
            rank.do(SealGeneration, session=session)
        rank.do(Discard, session=session)
        assert status(directory)["devices"]["cpu"] == held
        assert_same(rank, old)
    assert generation_of(rank) == status(directory)["cohorts"][cohort_of(rank)]["current"]


def cohort_of(rank: Rank) -> str:
    generations: Any = rank.served.memory.generations
    return str(generations.client.target.cohort)


def test_another_engine_follows_and_a_third_one_starts_with_the_new_weights(
    directory: Path, ranks: NewRank, old: Path, new: tuple[Path, State]
) -> None:
    first, second = ranks(directory), ranks(directory)
    heard: list[Any] = []
    assert second.served.memory.generations is not None
    second.served.memory.generations.watch(lambda *notice: heard.append(notice))
    begin(first)
    first.do(Take, session=1, payload=save(new[1]), copy=True)
    commit(first, version="v7")
    gms.until(lambda: len(heard) == 1, "the notice")
    (number, version, model_path) = heard[0]
    assert (number, version, model_path) == (generation_of(first), "v7", None)
    assert_same(second, old)
    second.do(FetchGeneration, generation=number)
    assert_same(second, old)
    fields = second.do(AdoptGeneration)
    assert fields["generation"] == (number, first.served.memory.generations.name)  # type: ignore[union-attr]
    assert_same(second, new[0])
    gms.until(lambda: len(readers(directory, first)) == 1, "the first generation is given up")
    third = ranks(directory)
    assert_same(third, new[0])
    generations = third.served.memory.generations
    assert generations is not None and (generations.number, generations.version) == (number, "v7")
    third.do(RenameWeights, version="v8")
    gms.until(lambda: len(heard) == 2, "the notice")
    assert heard[1] == (number, "v8", None)


def readers(directory: Path, rank: Rank) -> list[Any]:
    """The generations of a rank's cohort that the service has."""
    found = status(directory)["generations"]
    return [each for each in found if any(cohort_of(rank) in name for name in each["readers"])]


def test_what_another_engine_has_sealed_is_checked_before_it_is_served(
    directory: Path, ranks: NewRank, old: Path, new: tuple[Path, State], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = ranks(directory), ranks(directory)
    begin(first)
    first.do(Take, session=1, payload=save(new[1]), copy=True)
    right = NextGeneration._digests
    with monkeypatch.context() as patch:
        patch.setattr(NextGeneration, "_digests", lambda self: [each ^ 1 for each in right(self)])
        commit(first)
    reply = second.ask(FetchGeneration, generation=generation_of(first))
    assert "has other bytes" in reply.errors[0] and not reply.fields["is_lost"]
    second.do(DropGeneration)
    assert_same(second, old)


def test_an_update_without_the_service_fails_and_the_weights_stay(
    tmp_path: Path, ranks: NewRank, old: Path, new: tuple[Path, State]
) -> None:
    with gms.running(tmp_path / "own") as service:
        rank = ranks(tmp_path / "own")
        begin(rank)
        rank.do(Take, session=1, payload=save(new[1]), copy=True)
        gms.end(service, signal.SIGKILL)
        reply = rank.ask(SealGeneration, session=1)
        assert str(tmp_path) in reply.errors[0], reply
        rank.do(Discard, session=1)
        assert str(tmp_path) in rank.ask(OpenGeneration, session=2).errors[0]
        rank.do(Discard, session=2)
        assert_same(rank, old)


def test_a_service_that_has_lost_an_update_gets_it_back_from_its_engine(
    tmp_path: Path, ranks: NewRank, new: tuple[Path, State]
) -> None:
    own = tmp_path / "own"
    with gms.running(own) as service:
        rank = ranks(own)
        part = {KEY: torch.ones(rank.served.weight_map.shapes[KEY])}
        rank.served.memory.wake(3)  # it serves, with this epoch
        owner_lost: list[bool] = []
        rank.served.memory.watch_owner(owner_lost.append)
        begin(rank)
        rank.do(Take, session=1, payload=save(part), copy=True)
        commit(rank, version="v6")
        begin(rank, 2)
        rank.do(Take, session=2, payload=save(new[1]), copy=True)
        commit(rank, 2, version="v7")
        gms.end(service, signal.SIGKILL)
    with gms.running(own):
        gms.until(lambda: owner_lost == [True, False], "it does not come back")
        with gms.target(own, tag="watch") as client:
            assert "adopted" in [event.kind for event in client.events()]
        other = ranks(own)
        assert_same(other, new[0])
        generations = other.served.memory.generations
        assert generations is not None and generations.version == "v7"
        assert generation_of(rank) == generation_of(other)
        begin(rank, 3)
        rank.do(Take, session=3, payload=save(part), copy=True)
        commit(rank, 3, version="v8")
        assert generation_of(rank) > generation_of(other)


def test_a_slab_that_something_still_writes_to_ends_the_update(
    directory: Path, ranks: NewRank, old: Path, new: tuple[Path, State], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, held = ranks(directory), status(directory)["devices"]["cpu"]
    begin(rank)
    rank.do(Take, session=1, payload=save(new[1]), copy=True)
    num_bytes = status(directory)["devices"]["cpu"] - held
    with monkeypatch.context() as patch:
        patch.setattr("segue.memory.window.MemoryWindow.clear", lambda self: None)  # it stays mapped
        reply = rank.ask(SealGeneration, session=1)
    assert "still has it mapped for writing" in reply.errors[0]
    rank.do(Discard, session=1)
    assert status(directory)["devices"]["cpu"] == held + num_bytes, "its memory is not given to others"
    assert_same(rank, old)
    begin(rank, 2)
    rank.do(Discard, session=2)


def test_two_engines_that_update_take_turns(directory: Path, ranks: NewRank, new: tuple[Path, State]) -> None:
    first, second = ranks(directory), ranks(directory)
    begin(first)
    call = second.send(OpenGeneration, session=1)
    gms.until(lambda: len(status(directory)["waiting"]) == 1, "the second engine waits")
    first.do(Take, session=1, payload=save(new[1]), copy=True)
    commit(first)
    (refusal,) = second.reply(call).errors
    assert "has not taken them over yet" in refusal
    second.do(Discard, session=1)
    second.do(FetchGeneration, generation=generation_of(first))
    second.do(AdoptGeneration)
    begin(second, 2)
    second.do(Discard, session=2)


def test_a_generation_is_given_up_that_is_replaced_while_another_one_is_given_up(
    directory: Path, ranks: NewRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    generations: Any = ranks(directory).served.memory.generations
    unpinned = list[int]()

    def unpin(number: int) -> None:
        if not unpinned:
            generations.retired.append(7)  # as the thread that adopts does
        unpinned.append(number)

    monkeypatch.setattr(generations.client, "unpin", unpin)
    generations.retired.append(6)
    generations.unpin_retired()
    assert unpinned == [6, 7] and generations.retired == []
