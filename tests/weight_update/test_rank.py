"""The arena's contents after weights were received over gloo, staged, and committed or discarded."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from segue.distributed.info import TPInfo
from segue.layers.blocks import RMSNorm
from segue.memory.arena import ALIGNMENT, Arena
from segue.messages.weight_operations import Group
from segue.messages.weight_update import (
    Commit,
    Discard,
    Join,
    OpenGeneration,
    RankReply,
    Receive,
    Stage,
    Take,
)
from segue.models.decoder import Decoder, MoE
from segue.weight_update import staging, staging_memory
from segue.weight_update.checksum import checksum
from segue.weight_update.rank_session import RankSession, Replies
from segue.weight_update.staging import StagedWeights
from tests.checkpoint import tiny
from tests.weight_update.updating import Rank, State, Trainer, manifest_of, rank_of, transfer

QKV = "model.layers.0.self_attn.{}_proj.weight"
NORM = "model.norm.weight"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def checkpoint(kind: str, directory: Path, seed: int) -> tuple[Path, State]:
    """Returns a checkpoint and its state dict, in float32; another seed changes every value."""
    model = tiny.make(kind)
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.normal_(mean=0.3, std=0.2)
    directory.mkdir()
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return tiny.save(model, directory), state


def derived(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yields what is derived from the weights, as the steps use it."""
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            yield from module.packed.items()
        elif (gemm := getattr(module, "packed", None)) is not None:
            x = torch.randn(3, module.weight.shape[1], generator=torch.Generator().manual_seed(0)).to(
                torch.bfloat16
            )
            yield name, gemm(x, None)
        elif isinstance(module, RMSNorm):
            yield name, module.weight_float32
        elif getattr(module, "qk_weight", None) is not None:
            yield name, module.qk_weight


def assert_same(rank: Rank, path: Path, quantization: str = "auto") -> None:
    """Check that all weights, derived ones too, are bit for bit those of a start with this checkpoint."""
    model, arena = tiny.load(path, tp=rank.served.tp, dtype=torch.bfloat16, quantization=quantization)
    model.build_derived()
    assert_same_arena(rank.served.arena, arena)
    for (name, mine), (_, fresh) in zip(derived(rank.model), derived(model), strict=True):
        assert torch.equal(mine, fresh), name


def assert_same_arena(one: Arena, other: Arena) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one.slabs, other.slabs, strict=True))


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    with rank_of(checkpoint("qwen3", tmp_path / "old", 0)[0]) as rank:
        yield rank


@pytest.fixture
def tied(tmp_path: Path) -> Iterator[Rank]:
    with rank_of(checkpoint("llama-tied", tmp_path / "old", 0)[0]) as rank:
        yield rank


@pytest.mark.parametrize("kind", tiny.MODELS)
@pytest.mark.parametrize("size", [1, 2])
def test_after_a_commit_all_weights_are_as_after_a_fresh_start(kind: str, size: int, tmp_path: Path) -> None:
    old, before = checkpoint(kind, tmp_path / "old", 0)
    new, state = checkpoint(kind, tmp_path / "new", 1)
    state = {
        name: tensor.to(torch.bfloat16) if "v_proj" in name else tensor for name, tensor in state.items()
    }
    with rank_of(old, TPInfo(0, size)) as first, rank_of(old, TPInfo(size - 1, size)) as last:
        ranks = [first, last][:size]
        trainer = Trainer(ranks)
        for session, (path, sent, flattened) in enumerate(((new, state, True), (old, before, False)), 1):
            manifest = manifest_of(sent, flattened=flattened)
            for received in transfer(ranks, trainer, sent, manifest, session):
                assert received.error is None and received.num_buckets == 3
            for rank in ranks:
                assert rank.do(Commit, session=session)["touched"]
                assert_same(rank, path)


def test_progress_is_reported_at_the_first_byte_and_after_each_bucket(rank: Rank, tmp_path: Path) -> None:
    _, state = checkpoint("qwen3", tmp_path / "new", 1)
    transfer([rank], Trainer([rank]), state, manifest_of(state))
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    assert [message.num_buckets for message in rank.received] == [0, 1, 2, 3, 3]
    assert [message.done for message in rank.received] == [False] * 4 + [True]
    assert rank.received[-1].num_bytes == num_bytes


def test_an_update_of_a_part_of_a_parameter_leaves_the_rest(rank: Rank) -> None:
    before = {name: rank.served.arena.view(name).clone() for name in rank.served.arena.layout.table}
    state = {QKV.format("k"): torch.randn(rank.served.weight_map.shapes[QKV.format("k")])}
    transfer([rank], Trainer([rank]), state, manifest_of(state, partial=True))
    rank.do(Commit, session=1)
    (part,) = rank.served.weight_map.slices[QKV.format("k")]
    before[part.parameter][part.destination] = state[QKV.format("k")].to(torch.bfloat16)
    for name, expected in before.items():
        assert torch.equal(rank.served.arena.view(name), expected), name


def test_calls_of_one_session_are_committed_together(rank: Rank, tmp_path: Path) -> None:
    new, state = checkpoint("qwen3", tmp_path / "new", 1)
    names = list(state)
    parts = [{name: state[name] for name in names[start::3]} for start in range(3)]
    before = rank.served.arena.checksum()
    trainer = Trainer([rank])
    for part in parts[:2]:
        transfer([rank], trainer, part, manifest_of(part, partial=True))
    rank.do(Take, session=1, payload=save(parts[2]), copy=True)
    assert rank.served.arena.checksum() == before
    rank.do(Commit, session=1)
    assert_same(rank, new)


def test_received_weights_change_nothing_before_their_commit(rank: Rank, tmp_path: Path) -> None:
    _, state = checkpoint("qwen3", tmp_path / "new", 1)
    before = rank.served.arena.checksum()
    transfer([rank], Trainer([rank]), state, manifest_of(state))
    rank.do(Discard, session=1)
    assert rank.served.arena.checksum() == before
    assert rank.ask(Commit, session=1).errors == ["there is no session 1"]


def test_a_receive_can_be_discarded(rank: Rank, tmp_path: Path) -> None:
    new, state = checkpoint("qwen3", tmp_path / "new", 1)
    trainer = Trainer([rank])
    rank.do(Stage, session=1, manifest=manifest_of(state))
    rank.do(Receive, session=1)
    reply = rank.ask(Commit, session=1)
    assert "still being received" in reply.errors[0] and reply.fields["touched"] is False
    rank.do(Discard, session=1)
    assert [message.error for message in rank.received] == ["discarded"]
    assert "is dead" in rank.ask(Stage, session=2, manifest=manifest_of(state)).errors[0]
    del trainer
    again = Trainer([rank], name="again")
    transfer([rank], again, state, manifest_of(state, group="again"), session=3)
    rank.do(Commit, session=3)
    assert_same(rank, new)


@pytest.mark.parametrize("end", [Commit, Discard])
def test_a_session_waits_for_the_memory_of_the_previous_one(
    end: type[Any], rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    added, overlaps, release, add = threading.Event(), [], StagedWeights.release, StagedWeights.add

    def slow_release(self: StagedWeights, **options: Any) -> None:
        overlaps.append(added.wait(0.2))
        release(self, **options)

    def seen_add(self: StagedWeights, *arguments: Any) -> None:
        added.set()
        add(self, *arguments)

    payload = save({NORM: torch.ones(rank.served.weight_map.shapes[NORM])})
    rank.do(Take, session=1, payload=payload, copy=True)
    monkeypatch.setattr(StagedWeights, "release", slow_release)
    monkeypatch.setattr(StagedWeights, "add", seen_add)
    calls = [
        rank.send(end, session=1),
        rank.send(Take, session=2, payload=payload, copy=True),
    ]
    assert [rank.reply(call).errors for call in calls] == [[], []]
    assert overlaps == [False]
    monkeypatch.undo()


def test_a_commit_is_answered_before_its_memory_is_given_back(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, seen = threading.Event(), []

    def release(self: StagedWeights, **options: Any) -> None:
        seen.append(answered.wait(30))
        raise RuntimeError("it cannot be unmapped")

    payload = save({NORM: torch.ones(rank.served.weight_map.shapes[NORM])})
    rank.do(Take, session=1, payload=payload, copy=True)
    with monkeypatch.context() as patched:
        patched.setattr(StagedWeights, "release", release)
        assert rank.do(Commit, session=1)["touched"] is True
        answered.set()
        rank.do(Take, session=2, payload=payload, copy=True)
    assert seen == [True]


def test_a_discard_that_comes_while_a_commit_gives_its_memory_back_is_answered_after_that(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_release, released, release = threading.Event(), threading.Event(), StagedWeights.release

    def slow_release(self: StagedWeights, **options: Any) -> None:
        assert may_release.wait(30)
        release(self, **options)
        released.set()

    payload = save({NORM: torch.ones(rank.served.weight_map.shapes[NORM])})
    rank.do(Take, session=1, payload=payload, copy=True)
    monkeypatch.setattr(StagedWeights, "release", slow_release)
    rank.do(Commit, session=1)
    ending = rank.updater._sessions[1]
    while not ending._work.empty():  # until its thread waits in `slow_release`
        assert ending._thread.is_alive()
    call = rank.send(Discard, session=1)
    may_release.set()
    answer = rank.messages.get(timeout=5)
    assert isinstance(answer, RankReply) and (answer.call, answer.errors) == (call, [])
    assert released.is_set()


@pytest.mark.parametrize("fails", [False, True])
def test_shared_weights_are_given_back_only_when_they_have_been_adopted(
    fails: bool, rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A discard that comes too early waits, and both commands get one reply each."""
    arena = tiny.load(tmp_path / "old", dtype=torch.bfloat16)[1]
    may_adopt, adopting, order = threading.Event(), threading.Event(), list[str]()

    def adopt() -> None:
        adopting.set()
        assert may_adopt.wait(30)
        order.append("adopted")
        if fails:
            raise RuntimeError("it cannot be mapped")

    def release(*, in_use: bool) -> None:
        order.append("released")

    shared = SimpleNamespace(lease=1, arena=arena, take=lambda slabs: [], adopt=adopt, release=release)
    generations = SimpleNamespace(open=lambda: shared, number=2, name="2")
    monkeypatch.setattr(rank.served.memory, "generations", generations)
    payload = save({NORM: torch.ones(rank.served.weight_map.shapes[NORM])})
    rank.do(OpenGeneration, session=1)
    rank.do(Take, session=1, payload=payload, copy=True)
    calls = [rank.send(Commit, session=1)]
    assert adopting.wait(30)
    calls.append(rank.send(Discard, session=1))
    session = rank.updater._sessions[1]
    session._thread.join(0.2)
    assert order == [] and session._thread.is_alive()
    may_adopt.set()
    found = {answer.call: answer for answer in (rank.messages.get(timeout=5) for _ in calls)}
    assert [bool(found[call].errors) for call in calls] == [fails, False]
    assert found[calls[0]].fields == {"touched": True, "generation": (2, "2")}
    session.close()
    assert order == ["adopted", "released"] and rank.messages.empty()


def test_a_session_whose_manifest_was_refused_can_drop_its_broadcasts(rank: Rank) -> None:
    state = {"model.nothing": torch.zeros(3)}
    manifest = manifest_of(state, partial=True)
    trainer = Trainer([rank])
    assert rank.ask(Stage, session=1, manifest=manifest).errors == [
        "'model.nothing' is not a tensor of this model"
    ]
    before = rank.served.arena.checksum()
    (received,) = transfer([rank], trainer, state, manifest_of(state, partial=True, discard=True))
    assert received.error is None and received.num_buckets == 1
    rank.do(Discard, session=1)
    assert rank.served.arena.checksum() == before


def test_dropped_tensors_are_not_checked_against_an_earlier_manifest(rank: Rank) -> None:
    state = {NORM: torch.ones(rank.served.weight_map.shapes[NORM])}
    options = {"partial": True, "checksums": {NORM: checksum(state[NORM])}}
    trainer = Trainer([rank])
    rank.do(Stage, session=1, manifest=manifest_of(state, **options))  # another rank refuses it
    (received,) = transfer([rank], trainer, state, manifest_of(state, discard=True, **options))
    assert received.error is None


def test_a_join_reports_new_kept_and_dropped_groups(
    rank: Rank, new_trainer: Callable[[], Any], new_group: Callable[..., Group]
) -> None:
    def join(group: Group, timeout_s: float = 20.0) -> tuple[bool, bool, list[str]]:
        reply = rank.ask(Join, group=group, timeout_s=timeout_s)
        kept = not reply.errors or "is joined already" in reply.errors[0]
        return reply.fields["is_new"], kept and not reply.fields["is_new"], reply.fields["dropped"]

    group, trainer = new_group("a"), new_trainer()
    assert join(group, 0.2) == (False, False, [])  # no trainer listens
    trainer.host(group)
    assert join(group) == (True, False, [])
    assert trainer.answer() == {}
    assert join(group) == (False, True, [])
    assert join(new_group("a")) == (False, True, [])  # refused
    assert join(new_group("b"), 0.2) == (False, False, [])
    trainer.kill()
    assert join(new_group("b"), 0.2) == (False, False, ["a"])
    again, trainer = new_group("a"), new_trainer()
    trainer.host(again)
    assert join(again) == (True, False, [])
    trainer.kill()
    assert join(again, 0.2) == (False, False, ["a"])


def test_an_unknown_group_is_named(rank: Rank) -> None:
    (error,) = rank.ask(Stage, session=1, manifest=manifest_of({}, partial=True)).errors
    assert "no group 'g'" in error


def test_a_manifest_without_buckets_is_received_at_once(rank: Rank) -> None:
    (received,) = transfer([rank], Trainer([rank]), {}, manifest_of({}, partial=True))
    assert received.error is None
    assert rank.do(Commit, session=1)["touched"] is False


@pytest.mark.parametrize("flattened", [False, True])
def test_checksums_are_compared(flattened: bool, rank: Rank, tmp_path: Path) -> None:
    new, state = checkpoint("qwen3", tmp_path / "new", 1)
    state = {
        name: tensor.to(torch.bfloat16) if "k_proj" in name else tensor for name, tensor in state.items()
    }
    sums = {name: checksum(tensor) for name, tensor in state.items()}
    trainer = Trainer([rank])
    wrong = [QKV.format("k"), QKV.format("q")]  # one is received directly, the other is cast
    manifest = manifest_of(
        state, flattened=flattened, checksums=sums | {name: sums[name] + 1 for name in wrong}
    )
    (received,) = transfer([rank], trainer, state, manifest)
    assert received.error is not None
    assert [name for name in state if repr(name) in received.error] == [QKV.format("q"), QKV.format("k")]
    assert rank.ask(Commit, session=1).errors
    rank.do(Discard, session=1)
    transfer([rank], trainer, state, manifest_of(state, flattened=flattened, checksums=sums), session=2)
    rank.do(Commit, session=2)
    assert_same(rank, new)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.4e38])
def test_tensors_with_values_that_are_not_finite_are_reported(
    value: float, rank: Rank, tmp_path: Path
) -> None:
    old, state = tmp_path / "old", checkpoint("qwen3", tmp_path / "new", 1)[1]
    state[QKV.format("v")][3, 5] = value
    (received,) = transfer([rank], Trainer([rank]), state, manifest_of(state))
    assert received.error == f"{QKV.format('v')!r} has values that are not finite in bfloat16"
    assert rank.ask(Commit, session=1).fields == {"touched": False}
    rank.do(Discard, session=1)
    assert_same(rank, old)


def test_a_tied_head_may_be_absent_or_equal(tied: Rank, tmp_path: Path) -> None:
    new, state = checkpoint("llama-tied", tmp_path / "new", 1)
    trainer = Trainer([tied])
    first = {HEAD: state[HEAD], **{name: tensor for name, tensor in state.items() if name != HEAD}}
    (received,) = transfer([tied], trainer, first, manifest_of(first), session=1)
    assert received.error is None
    tied.do(Discard, session=1)
    for session, change in ((2, 1e-2), (3, 0.0)):
        sent = {**state, HEAD: state[HEAD] + change}
        (received,) = transfer([tied], trainer, sent, manifest_of(sent), session)
        if change:
            assert received.error is not None
            assert received.error.startswith(f"{HEAD!r} differs from {EMBED!r}, to which this model ties it")
            tied.do(Discard, session=session)
    tied.do(Commit, session=3)
    assert_same(tied, new)


@pytest.mark.parametrize("copy", [False, True])
def test_tensors_of_a_payload_are_committed(copy: bool, tied: Rank, tmp_path: Path) -> None:
    new, state = checkpoint("llama-tied", tmp_path / "new", 1)
    state[HEAD] = state[HEAD].clone()
    before = tied.served.arena.checksum()
    fields = tied.do(Take, session=1, payload=save(state), copy=copy)
    assert fields["num_bytes"] == sum(tensor.nbytes for tensor in state.values())
    assert bool(fields["staging_bytes"]) == copy
    assert tied.served.arena.checksum() == before
    tied.do(Commit, session=1)
    assert_same(tied, new)


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (NORM, torch.full((48,), float("inf")), "not finite"),
        (HEAD, torch.zeros(1, 1), "has shape [1, 1]"),
        ("model.nothing", torch.zeros(1), "is not a tensor of this model"),
        (NORM, torch.zeros(48, dtype=torch.int32), "has dtype int32"),
    ],
)
def test_a_payload_is_checked_too(copy: bool, name: str, tensor: Tensor, message: str, tied: Rank) -> None:
    reply = tied.ask(Take, session=1, payload=save({name: tensor}), copy=copy)
    (error,) = reply.errors
    assert repr(name) in error and message in error


@pytest.mark.parametrize("copy", [False, True])
def test_a_tied_head_sent_alone_must_equal_the_served_embedding(copy: bool, tied: Rank) -> None:
    served = tied.served.arena.view("embed.weight")
    for session, value in ((1, served + 1), (2, served.clone())):
        payload = save({HEAD: value})
        errors = tied.ask(Take, session=session, payload=payload, copy=copy).errors
        assert bool(errors) == (session == 1)


def test_each_payload_counts_its_own_bytes(rank: Rank) -> None:
    tensor = torch.ones(rank.served.weight_map.shapes[NORM])
    for _ in range(2):
        fields = rank.do(Take, session=1, payload=save({NORM: tensor}), copy=True)
        assert fields["num_bytes"] == tensor.nbytes


def test_without_a_copy_a_session_has_one_payload(rank: Rank) -> None:
    payload = save({NORM: torch.ones(rank.served.weight_map.shapes[NORM])})
    rank.do(Take, session=1, payload=payload, copy=False)
    (error,) = rank.ask(Take, session=1, payload=payload, copy=False).errors
    assert "accepts no more" in error


def test_an_unknown_payload_is_refused(rank: Rank) -> None:
    (error,) = rank.ask(Take, session=1, payload=b"nothing", copy=False).errors
    assert "neither safetensors nor a pickle" in error


def test_too_little_memory_is_reported_in_bytes(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer([rank])
    monkeypatch.setattr(staging_memory, "free_cpu_memory", lambda: 1000)
    state = {EMBED: torch.zeros(rank.served.weight_map.shapes[EMBED])}
    staging = -(-state[EMBED].numel() * 2 // ALIGNMENT) * ALIGNMENT
    needed = staging + 2 * state[EMBED].nbytes
    (error,) = rank.ask(Stage, session=1, manifest=manifest_of(state, partial=True)).errors
    assert f"staging needs {needed} bytes" in error and f"{needed - 1000} are missing" in error
    del trainer


def test_a_failed_commit_reports_whether_it_has_written(tmp_path: Path) -> None:
    def rebuild(changed: Any, packed: Any) -> None:
        raise RuntimeError("no memory")

    old, _ = checkpoint("llama", tmp_path / "old", 0)
    with rank_of(old, rebuild=rebuild) as rank:
        payload = save({NORM: torch.ones(rank.served.weight_map.shapes[NORM])})
        rank.do(Take, session=1, payload=payload, copy=True)
        reply = rank.ask(Commit, session=1)
        assert reply.errors == ["RuntimeError: no memory"] and reply.fields["touched"] is True
        rank.do(Discard, session=1)
        assert rank.stream.submit(lambda: "goes on").result() == "goes on"


def test_a_failed_commit_holds_up_no_other_session_once_it_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, _ = checkpoint("llama", tmp_path / "old", 0)
    send, seen = Replies.send, []

    def observed(self: Replies, call: int, errors: Any = (), fields: Any = None) -> None:
        seen.append((bool(errors), rank.updater._sessions[1]._freed.is_set()))
        send(self, call, errors, fields)

    with rank_of(old, rebuild=lambda changed, packed: 1 / 0) as rank:
        payload = save({NORM: torch.ones(rank.served.weight_map.shapes[NORM])})
        rank.do(Take, session=1, payload=payload, copy=True)
        monkeypatch.setattr(Replies, "send", observed)
        assert rank.ask(Commit, session=1).errors == ["ZeroDivisionError: division by zero"]
        assert seen == [(True, True)], "a discard that follows the reply is the next to give memory back"


def test_a_commit_whose_result_is_unknown_counts_as_written(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, raises = RankSession._write, ["where steps run", "behind"]

    class Event:
        def synchronize(self) -> None:
            raise RuntimeError(raises.pop())

    def failing(self: RankSession) -> Any:
        errors, touched, _ = write(self)
        if len(raises) == 1:
            raise RuntimeError(raises.pop())
        return errors, touched, Event()

    monkeypatch.setattr(RankSession, "_write", failing)
    payload = save({NORM: torch.ones(rank.served.weight_map.shapes[NORM])})
    for session, where in ((1, "behind"), (2, "where steps run")):
        rank.do(Take, session=session, payload=payload, copy=True)
        reply = rank.ask(Commit, session=session)
        assert reply.errors == [f"RuntimeError: {where}"] and reply.fields == {"touched": True}


@pytest.mark.parametrize("kind", ["llama-tied", "qwen3", "qwen3-moe"])
@pytest.mark.parametrize("tp", [TPInfo(), TPInfo(1, 2)], ids=str)
def test_tensors_stored_at_once_equal_those_stored_one_by_one(
    kind: str, tp: TPInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA, where one kernel copies all tensors that need no cast; here torch copies them."""
    monkeypatch.setattr(staging, "is_groupable", lambda to, source: to.dtype == source.dtype)
    path, state = checkpoint(kind, tmp_path / "model", 0)
    state = {
        name: tensor if index % 3 == 0 else tensor.bfloat16()
        for index, (name, tensor) in enumerate(state.items())
    }
    manifest = manifest_of(state)
    with rank_of(path, tp) as rank:
        staged = [
            StagedWeights(rank.served, staging_memory.StagingMemory(rank.served.memory, rank.served.specs))
            for _ in range(2)
        ]
        one_by_one, at_once = (
            staging.Incoming(each, manifest, rank.served.device, receive_buffer=0) for each in staged
        )
        for name, tensor in state.items():
            one_by_one.store(name, tensor)
        store = at_once.prepare(list(state.items()))
        assert not staged[1].whole.slabs[0].any()
        store()
        for one, other in zip(*(each.whole.slabs for each in staged), strict=True):
            assert torch.equal(one, other)
