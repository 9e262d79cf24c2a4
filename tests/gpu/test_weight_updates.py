"""Staging on the device and in pinned memory, and commits from there; tensors are received over gloo."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from segue.distributed.info import TPInfo
from segue.errors import OutOfMemoryError
from segue.memory.arena import TensorSpec
from segue.memory.rank_memory import PrivateMemory
from segue.messages.weight_operations import CheckWeights
from segue.messages.weight_update import Commit, Discard, Inspect, Stage, Take
from segue.weight_update import rank_session
from segue.weight_update.checksum import checksum
from segue.weight_update.staging_memory import StagingMemory
from tests.checkpoint import tiny
from tests.weight_update.test_rank import HEAD, NORM, checkpoint
from tests.weight_update.updating import Rank, State, Trainer, manifest_of, rank_of, transfer

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
PLACES: dict[str, dict[str, Any]] = {
    "device": {},
    "reserved": {"reserved": 1 << 30},
    "host": {"headroom": 1 << 60},
}


def assert_committed(rank: Rank, path: Path, places: list[int]) -> None:
    """Check that the device has the weights of `path`, at the addresses of the old ones."""
    _, fresh = tiny.load(path, tp=rank.served.tp, dtype=torch.bfloat16)
    arena = rank.served.arena
    assert [arena.view(name).data_ptr() for name in arena.layout.table] == places
    assert arena.checksum() == fresh.checksum()


@pytest.mark.parametrize("kind", ["llama-tied", "qwen3-moe"])
@pytest.mark.parametrize("tp", [TPInfo(), TPInfo(1, 2)], ids=str)
@pytest.mark.parametrize("case", PLACES)
def test_weights_of_any_dtype_are_committed(kind: str, tp: TPInfo, case: str, tmp_path: Path) -> None:
    old, before = checkpoint(kind, tmp_path / "old", 0)
    new, state = checkpoint(kind, tmp_path / "new", 1)
    state = {name: value.bfloat16() if "v_proj" in name else value for name, value in state.items()}
    with rank_of(old, tp, device=DEVICE, **PLACES[case]) as rank:
        places = [rank.served.arena.view(name).data_ptr() for name in rank.served.arena.layout.table]
        trainer = Trainer([rank])
        for session in range(1, 5):
            path, sent = ((old, before), (new, state))[session % 2]
            sums = {name: checksum(tensor) for name, tensor in sent.items()}
            manifest = manifest_of(sent, flattened=session > 2, checksums=sums)
            (received,) = transfer([rank], trainer, sent, manifest, session)
            assert received.error is None
            rank.do(Commit, session=session)
            assert_committed(rank, path, places)


def test_missing_device_memory_is_reported_and_host_memory_is_used(tmp_path: Path) -> None:
    old, state = checkpoint("qwen3", tmp_path / "old", 0)
    with rank_of(old, device=DEVICE, headroom=1 << 60) as rank:
        trainer = Trainer([rank])
        manifest = manifest_of(state, staging="device")
        (error,) = rank.ask(Stage, session=1, manifest=manifest).errors
        assert "bytes of device memory are missing" in error
        rank.do(Discard, session=1)
        fields = rank.do(Stage, session=2, manifest=manifest_of(state))
        assert fields["place"] == "host" and "bytes of device memory are missing" in fields["note"]
        del trainer


def test_receive_buffers_that_do_not_fit_are_refused() -> None:
    specs = [TensorSpec(name="w", shape=(8,), dtype=torch.bfloat16)]
    staging = StagingMemory(PrivateMemory(torch.device(DEVICE)), specs)
    staging.check_receive_buffers(1 << 20)
    with pytest.raises(OutOfMemoryError, match="missing for two receive buffers"):
        staging.check_receive_buffers(1 << 50)


def test_values_that_are_not_finite_are_reported_wherever_they_are_staged(tmp_path: Path) -> None:
    old, state = checkpoint("qwen3", tmp_path / "old", 0)
    state[NORM][3] = float("nan")
    for options in PLACES.values():
        with rank_of(old, device=DEVICE, **options) as rank:
            (received,) = transfer([rank], Trainer([rank]), state, manifest_of(state))
            assert received.error == f"{NORM!r} has values that are not finite in bfloat16"


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("tp", [TPInfo(), TPInfo(1, 2)], ids=str)
def test_tensors_on_the_device_are_committed(
    copy: bool, tp: TPInfo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(payload: bytes, *_: object, **__: object) -> list[tuple[str, Tensor]]:
        return [(name, tensor.to(DEVICE)) for name, tensor in sent.items()]

    monkeypatch.setattr(rank_session, "decode", decode)
    old, _ = checkpoint("llama-tied", tmp_path / "old", 0)
    new, state = checkpoint("llama-tied", tmp_path / "new", 1)
    sent: State = {name: tensor.bfloat16() if "mlp" in name else tensor for name, tensor in state.items()}
    assert HEAD in sent
    with rank_of(old, tp, device=DEVICE) as rank:
        places = [rank.served.arena.view(name).data_ptr() for name in rank.served.arena.layout.table]
        rank.do(Take, session=1, payload=b"", copy=copy)
        rank.do(Commit, session=1)
        assert_committed(rank, new, places)


def test_checksums_are_those_of_a_cpu(tmp_path: Path) -> None:
    old, _ = checkpoint("qwen3-moe", tmp_path / "old", 0)
    request = CheckWeights(action="checksum")
    with rank_of(old) as on_cpu, rank_of(old, device=DEVICE) as on_cuda:
        found = [rank.do(Inspect, request=request)["checksums"] for rank in (on_cpu, on_cuda)]
        assert found[0] == found[1]
        on_cuda.do(Inspect, request=CheckWeights(action="snapshot"))
        assert on_cuda.do(Inspect, request=CheckWeights(action="compare"))["differ"] == []
