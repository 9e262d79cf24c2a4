"""Rank 0's control of weights that engines share: its own updates, and those of other engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from segue.errors import NewWeightsError
from segue.messages.weight_operations import (
    AbortSession,
    BeginUpdate,
    Complete,
    EndUpdate,
    GetUpdateStatus,
    SetVersion,
    UpdateFromDisk,
    UpdateFromTensor,
)
from segue.messages.weight_update import (
    AdoptGeneration,
    Commit,
    Discard,
    FetchGeneration,
    FlipGeneration,
    JoinGeneration,
    OpenGeneration,
    RankReply,
    RenameWeights,
    SealGeneration,
    WeightCommand,
    WeightNotice,
    WeightsChanged,
)
from segue.scheduler.invariants import find_problems
from segue.scheduler.pause import PauseState
from tests.weight_update.control.operations import join, single
from tests.weight_update.control.test_calls import GROUP, PART, Engine, prepare

DISK = UpdateFromDisk(model_path="/new")
BEGIN = ["OpenGeneration", "JoinGeneration"]
END = ["SealGeneration", "FlipGeneration", "Commit"]


class SharingEngine(Engine):
    """Its ranks have a lease for the asking, and follow."""

    def __init__(self) -> None:
        super().__init__(gms_dir="/run/gms")
        self.weights.machine.start_with(5, "five", "0", None)
        self.is_lost = True  # whether a fetch that fails has lost the service

    def carry_out(self, rank: int, command: WeightCommand) -> None:
        fields: dict[str, Any] = {}
        if isinstance(command, OpenGeneration):
            fields = {"lease": 7} if rank == 0 else {}
        elif isinstance(command, Commit | AdoptGeneration):
            fields = {"generation": (6, "six"), "touched": True}
        elif isinstance(command, FetchGeneration):
            fields = {"is_lost": self.is_lost}
        else:
            super().carry_out(rank, command)
            return
        errors = self.broken.get((rank, type(command)), [])
        self.weights.on_rank(RankReply(rank=rank, call=command.call, errors=errors, fields=fields), self.now)

    def notice(self, generation: int = 6, version: str = "theirs") -> None:
        self.weights.on_rank(WeightsChanged(generation=generation, version=version), self.now)
        self.go()

    @property
    def version(self) -> str:
        return self.scheduler.weights.weight_version

    @property
    def is_held(self) -> bool:
        return self.scheduler.control.state is not PauseState.RUNNING


@pytest.fixture
def engine() -> Iterator[SharingEngine]:
    engine = SharingEngine()
    assert engine.reply(join(GROUP)).success
    engine.kinds()
    yield engine
    assert not find_problems(engine.scheduler)
    assert all(len(answers) == 1 for answers in engine.answers.values()), "a call has one answer"


def test_every_update_is_sealed_before_generation_is_held(engine: SharingEngine) -> None:
    assert engine.reply(prepare(weight_version="v1")).success
    assert engine.kinds() == [*BEGIN, "Stage", "Receive"]
    engine.silent = {SealGeneration}
    call = engine.ask(Complete(group_name="g"))
    assert engine.state == "sealing" and not engine.is_held
    again = engine.ask(Complete(group_name="g"))
    engine.silent = {FlipGeneration}
    engine.go()
    assert engine.state == "committing" and engine.is_held
    (flip,) = (each for each in engine.done if isinstance(each, FlipGeneration))
    assert (flip.version, flip.model_path) == ("v1", None)
    engine.silent.clear()
    engine.go()
    assert engine.answer(call).success and engine.answer(again).success
    assert engine.kinds() == END and engine.version == "v1" and not engine.is_held
    assert engine.weights.machine.generation == 6


def test_single_calls_and_groups_of_calls_take_one_lease(engine: SharingEngine) -> None:
    assert engine.reply(DISK).success
    (joined,) = (each for each in engine.done if isinstance(each, JoinGeneration))
    assert joined.lease == 7, "that of rank 0"
    assert engine.kinds() == [*BEGIN, "Load", *END] and engine.version == "1"
    assert engine.reply(BeginUpdate()).success
    for _ in range(2):
        assert engine.reply(UpdateFromTensor(serialized_named_tensors=["x"])).success
    assert engine.kinds() == [*BEGIN, "Take", "Take"]
    assert engine.reply(EndUpdate()).success
    assert engine.kinds() == END and engine.version == "2"


@pytest.mark.parametrize("kind", [OpenGeneration, JoinGeneration, SealGeneration, FlipGeneration])
def test_an_update_that_fails_before_its_commit_changes_nothing(engine: SharingEngine, kind: type) -> None:
    engine.broken = {(1, kind): ["the service is gone"]}
    answer = engine.reply(DISK)
    assert not answer.success and "the service is gone" in answer.message
    assert (engine.version, engine.state, engine.is_held) == ("0", "idle", False)
    engine.broken.clear()
    assert engine.reply(DISK).success


def test_a_broadcast_that_finds_no_lease_is_received_and_dropped(engine: SharingEngine) -> None:
    engine.broken = {(0, OpenGeneration): ["engine b still reads"]}
    answer = engine.reply(single(PART))
    assert not answer.success and "engine b still reads" in answer.message
    assert engine.kinds() == ["OpenGeneration", "Stage", "Receive"]


def test_an_engine_that_cannot_serve_what_it_has_committed_ends(engine: SharingEngine) -> None:
    engine.broken = {(1, Commit): ["no address"]}
    with pytest.raises(NewWeightsError, match="no address"):
        engine.ask(DISK)
    engine.answers.clear()


def test_a_version_is_that_of_the_service(engine: SharingEngine) -> None:
    engine.broken = {(0, RenameWeights): ["the service is gone"]}
    assert not engine.reply(SetVersion(new_version="a")).success and engine.version == "0"
    engine.broken.clear()
    assert engine.reply(SetVersion(new_version="a")).success and engine.version == "a"
    engine.notice(5, "b")
    assert engine.version == "b" and "FetchGeneration" not in engine.kinds()


def test_another_engines_weights_are_fetched_while_requests_run(engine: SharingEngine) -> None:
    engine.sim.add("a", [1, 2, 3], max_new_tokens=5)
    engine.sim.launch()
    engine.silent = {FetchGeneration}
    engine.notice()
    assert not engine.is_held
    refused = engine.reply(DISK)
    assert not refused.success and "takes them over" in refused.message
    engine.silent.clear()
    engine.go()
    assert engine.is_held and engine.kinds()[-1] == "FetchGeneration", "a step is in flight"
    engine.sim.apply()
    engine.go()
    assert engine.kinds() == ["AdoptGeneration"] and not engine.is_held
    assert engine.version == "theirs"
    (last,) = [each for each in engine.others if isinstance(each, WeightNotice)][-1:]
    assert (last.version, last.generation) == ("theirs", "six")
    assert engine.reply(DISK).success


def test_an_engine_without_requests_serves_none_until_it_has_followed(engine: SharingEngine) -> None:
    engine.silent = {FetchGeneration}
    engine.notice()
    assert engine.is_held
    engine.sim.add("a", [1, 2, 3], max_new_tokens=5)
    assert engine.sim.launch() is None
    engine.silent.clear()
    engine.go()
    assert not engine.is_held and engine.version == "theirs" and engine.sim.launch() is not None
    engine.sim.apply()


def test_an_open_session_ends_before_other_weights_are_served(engine: SharingEngine) -> None:
    assert engine.reply(prepare()).success
    engine.silent = {Discard}
    engine.notice()
    assert engine.state == "idle" and "FetchGeneration" not in engine.kinds(), "its threads read the weights"
    engine.silent.clear()
    engine.go()
    assert engine.kinds() == ["FetchGeneration", "AdoptGeneration"]
    status = engine.reply(GetUpdateStatus())
    assert status.fields["weight_version"] == "theirs" and status.fields["num_failed"] == 1
    assert not engine.reply(AbortSession()).success


def test_an_engine_that_cannot_follow_waits_for_the_service_or_ends(engine: SharingEngine) -> None:
    engine.broken = {(1, FetchGeneration): ["not there"]}
    engine.notice()
    assert engine.version == "0" and not engine.is_held
    assert engine.kinds() == ["FetchGeneration", "DropGeneration"]
    engine.broken.clear()
    engine.notice()
    assert engine.version == "theirs"
    engine.weights.machine.start_with(5, "five", "0", None)
    engine.broken, engine.is_lost = {(1, FetchGeneration): ["other bytes"]}, False
    with pytest.raises(NewWeightsError, match="other bytes"):
        engine.notice()


def test_two_updates_in_a_row_end_at_the_last_one(engine: SharingEngine) -> None:
    engine.silent = {FetchGeneration}
    engine.notice(6, "one")
    engine.notice(8, "two")
    engine.silent.clear()
    engine.go()
    fetched = [each.generation for each in engine.done if isinstance(each, FetchGeneration)]
    assert fetched == [6, 8] and engine.version == "two"
