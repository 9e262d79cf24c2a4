import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from segue.checkpoint import hub
from segue.checkpoint.source import resolve
from segue.distributed.info import TPInfo
from segue.messages.weight_update import Commit, Discard, Load
from segue.weight_update import from_checkpoint, rank_session
from tests.checkpoint import tiny, tiny_gguf
from tests.conftest import WaitUntil
from tests.weight_update.test_rank import assert_same, checkpoint
from tests.weight_update.updating import Rank, rank_of


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    with rank_of(checkpoint("llama-tied", tmp_path / "old", 0)[0]) as rank:
        yield rank


@pytest.mark.parametrize("kind", ["llama-tied", "qwen3-moe"])
@pytest.mark.parametrize("tp", [TPInfo(), TPInfo(1, 2)], ids=str)
def test_a_checkpoint_is_served_after_a_commit(kind: str, tp: TPInfo, tmp_path: Path) -> None:
    new, _ = checkpoint(kind, tmp_path / "new", 1)
    with rank_of(checkpoint(kind, tmp_path / "old", 0)[0], tp) as rank:
        before = rank.served.arena.checksum()
        fields = rank.do(Load, session=1, model_path=str(new), load_format=None)
        assert fields["num_bytes"] == sum(spec.num_bytes for spec in rank.served.specs)
        assert rank.served.arena.checksum() == before
        rank.do(Commit, session=1)
        assert_same(rank, new)


def test_a_directory_of_weights_alone_is_of_the_served_model(rank: Rank, tmp_path: Path) -> None:
    new, _ = checkpoint("llama-tied", tmp_path / "new", 1)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "model.safetensors").write_bytes((new / "model.safetensors").read_bytes())
    assert "is not within the directories of --weights-root" in refused(rank, bare, roots=[str(new)])
    rank.do(Load, session=99, model_path=str(bare), load_format=None, roots=[str(tmp_path)])
    rank.do(Commit, session=99)
    assert_same(rank, new)


def test_dummy_weights_are_those_of_a_start_with_dummy_weights(rank: Rank, tmp_path: Path) -> None:
    rank.do(Load, session=1, model_path=str(tmp_path / "old"), load_format="dummy")
    rank.do(Commit, session=1)
    _, fresh = tiny.load(tmp_path / "old", load_format="dummy", dtype=torch.bfloat16)
    assert rank.served.arena.checksum() == fresh.checksum()


def change_config(path: Path, **fields: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


def change_weights(path: Path, value: float) -> None:
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"][3] = value
    save_file(weights, path / "model.safetensors")


@pytest.mark.parametrize("case", ["path", "config", "nan", "truncated"])
def test_a_checkpoint_that_does_not_fit_leaves_the_old_weights(case: str, rank: Rank, tmp_path: Path) -> None:
    new, _ = checkpoint("llama-tied", tmp_path / "new", 1)
    path, message = new, ""
    match case:
        case "path":
            path, message = tmp_path / "nowhere", "does not exist"
        case "config":
            change_config(new, rope_theta=5.0, rope_parameters=None, num_hidden_layers=1)
            message = "num_layers is 1, not"
        case "nan":
            change_weights(new, float("nan"))
            message = "'model.norm.weight' has values that are not finite in bfloat16"
        case "truncated":
            with (new / "model.safetensors").open("r+b") as file:
                file.truncate(file.seek(0, 2) - 8)
            message = "is truncated"
    (error,) = rank.ask(Load, session=1, model_path=str(path), load_format=None).errors
    assert message in error
    assert rank.ask(Commit, session=1).fields == {"touched": False}
    rank.do(Discard, session=1)
    assert_same(rank, tmp_path / "old")


def test_reading_ends_when_the_session_is_discarded(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, _ = checkpoint("llama-tied", tmp_path / "new", 1)
    reached, go = threading.Event(), threading.Event()
    read = from_checkpoint.read_weights

    def slowly(*arguments: object, **options: object) -> Iterator[int]:
        for num_bytes in read(*arguments, **options):  # type: ignore[arg-type]
            reached.set()
            assert go.wait(60)
            yield num_bytes

    monkeypatch.setattr(from_checkpoint, "read_weights", slowly)
    load = rank.send(Load, session=1, model_path=str(new), load_format=None)
    assert reached.wait(60)
    discard = rank.send(Discard, session=1)
    go.set()
    assert rank.reply(load).errors == ["the update was discarded while its files were read"]
    assert rank.reply(discard).errors == []


def test_the_dtype_of_a_config_does_not_matter(rank: Rank, tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    half = tiny.save(tiny.make("llama-tied").to(torch.float16), tmp_path / "half")
    rank.do(Load, session=1, model_path=str(half), load_format="safetensors")
    rank.do(Commit, session=1)
    assert_same(rank, half)


def refused(rank: Rank, path: object, **options: object) -> str:
    """Returns the error of a checkpoint that cannot be read, and discards its session."""
    session = rank.calls + 1
    (error,) = rank.ask(Load, session=session, model_path=str(path), load_format=None, **options).errors
    rank.do(Discard, session=session)
    assert len(error) < 600
    return error


@pytest.fixture
def odd_files(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """Paths that exist, and are no regular files."""
    pipe, listener = tmp_path / "pipe", socket.socket(socket.AF_UNIX)
    os.mkfifo(pipe)
    listener.bind(str(tmp_path / "socket"))
    with_pipe, with_pipes = tmp_path / "with-pipe", tmp_path / "with-pipes"
    with_pipe.mkdir()
    os.mkfifo(with_pipe / "config.json")
    checkpoint("llama-tied", with_pipes, 1)
    (with_pipes / "model.safetensors").unlink()
    os.mkfifo(with_pipes / "model.safetensors")
    (tmp_path / "link").symlink_to("/dev/zero")
    (tmp_path / "links").symlink_to(tmp_path / "links")
    yield {
        "a file of the kernel": Path("/proc/self/pagemap"),
        "another": Path("/proc/self/status"),
        "a device": Path("/dev/zero"),
        "a link to a device": tmp_path / "link",
        "a link to itself": tmp_path / "links",
        "a pipe": pipe,
        "a socket": tmp_path / "socket",
        "a pipe for a config": with_pipe,
        "a pipe for weights": with_pipes,
    }
    listener.close()


def test_paths_that_are_no_regular_files_are_refused_at_once(
    rank: Rank, odd_files: dict[str, Path], tmp_path: Path
) -> None:
    for path in odd_files.values():
        error = refused(rank, path)
        assert any(
            message in error for message in ("is no regular file", "not a GGUF file", "does not exist")
        ), error
    new, _ = checkpoint("llama-tied", tmp_path / "new", 1)
    rank.do(Load, session=99, model_path=str(new), load_format=None)
    rank.do(Commit, session=99)
    assert_same(rank, new)


@pytest.mark.parametrize("path", ["/a" * 3000, "a" * 300, "a\0b", "\udc00\ud800"])
def test_impossible_paths_are_shortened_in_the_error(path: str, rank: Rank) -> None:
    error = refused(rank, path)
    assert "too long" in error or "character that no path may have" in error
    assert len(error) < 300


def test_a_file_name_that_is_no_valid_text_can_be_sent_in_an_error(rank: Rank, tmp_path: Path) -> None:
    for name in (b"one\x80.gguf", b"other.gguf"):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(b"GGUF")
    error = refused(rank, tmp_path)
    assert "one\\udc80.gguf, other.gguf" in error
    msgspec.msgpack.encode(error)  # does not raise: the reply can be sent


def read_of(path: Path) -> int:
    """Returns the position up to which this process has read its open file ``path``."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if descriptor.readlink() == path:
                return int(Path(f"/proc/self/fdinfo/{descriptor.name}").read_text().split()[1])
    return 0


def test_reading_ends_with_a_discard(rank: Rank, tmp_path: Path, wait_until: WaitUntil) -> None:
    endless = tmp_path / "endless.gguf"
    with endless.open("wb") as file:
        file.write(b"GGUF")
        file.truncate(1 << 40)  # sparse; reading it through takes half an hour
    load = rank.send(Load, session=1, model_path=str(endless), load_format=None)
    wait_until(lambda: read_of(endless) > 4 << 20, what="a reader in the middle of the file")
    discard = rank.send(Discard, session=1)
    assert rank.reply(load).errors == ["the update was discarded while its files were read"]
    assert rank.reply(discard).errors == []
    new, _ = checkpoint("llama-tied", tmp_path / "new", 1)
    rank.do(Load, session=2, model_path=str(new), load_format=None)
    rank.do(Commit, session=2)
    assert_same(rank, new)


def test_an_update_waits_for_the_previous_ones_memory_for_a_limited_time(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, _ = checkpoint("llama-tied", tmp_path / "new", 1)
    reached, go = threading.Event(), threading.Event()

    def hang(*arguments: object) -> list[str]:
        reached.set()
        assert go.wait(60)
        return ["it was hanging"]

    load = from_checkpoint.load
    monkeypatch.setattr(from_checkpoint, "load", hang)
    monkeypatch.setattr(rank_session, "_FREED_S", 0.5)
    hanging = rank.send(Load, session=1, model_path=str(new), load_format=None)
    assert reached.wait(60)
    discard = rank.send(Discard, session=1)
    monkeypatch.setattr(from_checkpoint, "load", load)
    (error,) = rank.ask(Load, session=2, model_path=str(new), load_format=None).errors
    assert "has not given its memory back for 0.5 s" in error
    go.set()
    replies = {rank.messages.get(timeout=20).call for _ in range(2)}  # type: ignore[union-attr]
    assert replies == {hanging, discard}
    rank.do(Discard, session=2)
    rank.do(Load, session=3, model_path=str(new), load_format=None)
    rank.do(Commit, session=3)
    assert_same(rank, new)


def test_models_outside_of_the_roots_give_the_error_of_missing_ones(rank: Rank, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    outside, _ = checkpoint("llama-tied", tmp_path / "outside", 1)
    (root / "link").symlink_to(outside)
    (tmp_path / "rootless").mkdir()
    paths = [
        outside, tmp_path / "nowhere", root / "link", root / ".." / "outside", root / ".." / "nowhere",
        tmp_path / "rootless", Path("/etc/passwd"), Path("/nowhere"),
        Path("/proc/self/pagemap"), Path("~root"),
    ]  # fmt: skip
    message = {
        refused(rank, path, roots=[str(root)], from_hub=False).replace(str(path), "…") for path in paths
    }
    assert message == {"model '…' is not within the directories of --weights-root"}
    assert "does not exist" in refused(rank, root / "nowhere", roots=[str(root)], from_hub=False)


def test_a_model_within_the_roots_is_read_and_its_links_may_lead_to_another_root(
    rank: Rank, tmp_path: Path
) -> None:
    root, blobs = tmp_path / "root", tmp_path / "blobs"
    blobs.mkdir()
    root.mkdir()
    new, _ = checkpoint("llama-tied", root / "new", 1)
    (new / "model.safetensors").rename(blobs / "sha")
    (new / "model.safetensors").symlink_to(blobs / "sha")  # as in a hub's cache
    assert "leads to a file outside" in refused(rank, new, roots=[str(root)])
    (tmp_path / "link").symlink_to(root)
    rank.do(
        Load, session=9, model_path=str(new), load_format=None, roots=[str(tmp_path / "link"), str(blobs)]
    )
    rank.do(Commit, session=9)
    assert_same(rank, new)


def test_a_converted_model_within_the_roots_is_read_through_the_cache(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    model = tiny_gguf.write(tmp_path / "root" / "a.gguf", tiny.make("llama"))
    roots = [str(model.parent)]
    directory = resolve(str(model), "auto", tmp_path / "cache").directory
    with rank_of(directory, load_format="dummy", cache_dir=tmp_path / "cache") as rank:
        fields = rank.do(
            Load, session=1, model_path=str(model), load_format=None, roots=roots, from_hub=False
        )
        assert fields["num_bytes"] == sum(spec.num_bytes for spec in rank.served.specs)
        rank.do(Discard, session=1)
        assert "not within" in refused(rank, directory, roots=roots, from_hub=False)


def test_hub_ids_are_fetched_only_if_that_is_allowed(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "fetch", lambda *arguments, **options: pytest.fail("it was fetched"))
    for roots in (None, ["/models"]):
        assert "--weights-from-hub" in refused(rank, "owner/name", roots=roots, from_hub=False)


def test_the_repository_of_the_model_is_read_at_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (
        checkpoint("llama-tied", tmp_path / name, seed)[0] for seed, name in enumerate(("old", "new"))
    )
    fetched = tmp_path / "fetched"
    child = f"import sys; print(sys.argv[1:3], file=open({str(fetched)!r}, 'a')); print({str(new)!r})"
    monkeypatch.setattr(hub, "_CHILD", child)
    with rank_of(old, revisions=hub.revisions("owner/name:Q8_0", "v2")) as rank:
        for model in ("owner/name", "owner/other"):
            rank.do(Load, session=1, model_path=model, load_format=None)
        rank.do(Commit, session=1)
        assert_same(rank, new)
    assert fetched.read_text() == "['owner/name', 'v2']\n['owner/other', '']\n"
    assert hub.revisions("owner/name", None) == hub.revisions(None, None) == {}


def test_a_download_ends_when_the_session_is_discarded(
    rank: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "pid"
    child = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    monkeypatch.setattr(hub, "_CHILD", child)
    load = rank.send(Load, session=1, model_path="owner/name", load_format=None)
    deadline = time.monotonic() + 20
    while not (mark.exists() and mark.read_text()):
        assert time.monotonic() < deadline
    discard = rank.send(Discard, session=1)
    assert rank.reply(load).errors == ["the update was discarded while its files were read"]
    assert rank.reply(discard).errors == []
    assert not Path(f"/proc/{mark.read_text()}").exists()


def test_a_failed_download_reports_the_cause(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_CHILD", "raise ValueError('no such repository')")
    assert "(ValueError: no such repository)" in refused(rank, "owner/name")
