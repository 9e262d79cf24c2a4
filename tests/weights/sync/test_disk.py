import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from segue.distributed.info import TPInfo
from segue.protocol.weights import Commit, Discard, Load
from segue.weights.sync import disk
from tests.weights import tiny
from tests.weights.sync.test_update import assert_same, checkpoint
from tests.weights.sync.updating import Rank, rank_of


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    with rank_of(checkpoint("llama-tied", tmp_path / "old", 0)[0]) as rank:
        yield rank


@pytest.mark.parametrize("kind", ["llama-tied", "qwen3-moe"])
@pytest.mark.parametrize("tp", [TPInfo(), TPInfo(1, 2)], ids=str)
def test_a_checkpoint_becomes_live(kind: str, tp: TPInfo, tmp_path: Path) -> None:
    new, _ = checkpoint(kind, tmp_path / "new", 1)
    with rank_of(checkpoint(kind, tmp_path / "old", 0)[0], tp) as rank:
        before = rank.live.arena.checksum()
        fields = rank.do(Load, session=1, model_path=str(new), load_format=None)
        assert fields["num_bytes"] == sum(spec.num_bytes for spec in rank.live.specs)
        assert rank.live.arena.checksum() == before
        rank.do(Commit, session=1)
        assert_same(rank, new)


def test_made_up_weights_are_those_of_a_start_with_them(rank: Rank, tmp_path: Path) -> None:
    rank.do(Load, session=1, model_path=str(tmp_path / "old"), load_format="dummy")
    rank.do(Commit, session=1)
    _, fresh = tiny.load(tmp_path / "old", load_format="dummy", dtype=torch.bfloat16)
    assert rank.live.arena.checksum() == fresh.checksum()


def change_config(path: Path, **fields: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


def change_weights(path: Path, value: float) -> None:
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"][3] = value
    save_file(weights, path / "model.safetensors")


@pytest.mark.parametrize("case", ["path", "format", "config", "nan", "truncated"])
def test_a_checkpoint_that_does_not_fit_leaves_the_old_weights(case: str, rank: Rank, tmp_path: Path) -> None:
    new, _ = checkpoint("llama-tied", tmp_path / "new", 1)
    path, load_format, said = new, None, ""
    match case:
        case "path":
            path, said = tmp_path / "nowhere", "does not exist"
        case "format":
            load_format, said = "pt", "load_format is 'pt'"
        case "config":
            change_config(new, rope_theta=5.0, rope_parameters=None, num_hidden_layers=1)
            said = "num_layers is 1, not"
        case "nan":
            change_weights(new, float("nan"))
            said = "'model.norm.weight' has values that are not finite in bfloat16"
        case "truncated":
            with (new / "model.safetensors").open("r+b") as file:
                file.truncate(file.seek(0, 2) - 8)
            said = "is truncated"
    (error,) = rank.ask(Load, session=1, model_path=str(path), load_format=load_format).errors
    assert said in error
    assert rank.ask(Commit, session=1).fields == {"touched": False}
    rank.do(Discard, session=1)
    assert_same(rank, tmp_path / "old")


def test_reading_ends_when_it_is_discarded(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, _ = checkpoint("llama-tied", tmp_path / "new", 1)
    reached, go = threading.Event(), threading.Event()
    read = disk.read_weights

    def slowly(*arguments: object, **options: object) -> Iterator[int]:
        for num_bytes in read(*arguments, **options):  # type: ignore[arg-type]
            reached.set()
            assert go.wait(20)
            yield num_bytes

    monkeypatch.setattr(disk, "read_weights", slowly)
    load = rank.send(Load, session=1, model_path=str(new), load_format=None)
    assert reached.wait(20)
    discard = rank.send(Discard, session=1)
    go.set()
    assert rank.reply(load).errors == ["discarded while it was read"]
    assert rank.reply(discard).errors == []


def test_what_a_config_says_of_the_dtype_does_not_matter(rank: Rank, tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    half = tiny.save(tiny.make("llama-tied").to(torch.float16), tmp_path / "half")
    rank.do(Load, session=1, model_path=str(half), load_format="safetensors")
    rank.do(Commit, session=1)
    assert_same(rank, half)
