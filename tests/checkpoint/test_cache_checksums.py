"""Checksums of Segue's own files: any difference from what was written is found, at any position."""

from pathlib import Path

import pytest

from segue.checkpoint import cache

PIECE = 64


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a directory of files with no, one and several pieces, one of them full; pieces are small."""
    monkeypatch.setattr(cache, "_PIECE", PIECE)
    monkeypatch.setattr(cache, "_BLOCK", 16)
    for name, size in (("none", 0), ("one", 10), ("full", 2 * PIECE), ("many", 5 * PIECE + 7)):
        (tmp_path / name).write_bytes(bytes(i % 251 for i in range(size)))
    cache.write_checksums(tmp_path / "record", ["none", "one", "full", "many"])
    return tmp_path


def test_unchanged_files_have_no_damage(directory: Path) -> None:
    assert cache.find_damage(directory / "record") is None
    (directory / "another").touch()
    assert cache.find_damage(directory / "record") is None


@pytest.mark.parametrize("name", ["one", "full", "many"])
def test_every_changed_byte_is_found(name: str, directory: Path) -> None:
    content = (directory / name).read_bytes()
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        (directory / name).write_bytes(changed)
        assert cache.find_damage(directory / "record") == f"{name} differs from what was written"


@pytest.mark.parametrize("name", ["none", "one", "full", "many"])
def test_added_bytes_lost_bytes_and_reordered_pieces_are_found(name: str, directory: Path) -> None:
    content = (directory / name).read_bytes()
    wrong = [content + b"\0", content[:-1] if content else b"\0", content[PIECE:] + content[:PIECE] + b"\0"]
    for other in wrong:
        (directory / name).write_bytes(other)
        assert cache.find_damage(directory / "record") == f"{name} differs from what was written"


def test_a_missing_file_and_a_directory_in_its_place_are_found(directory: Path) -> None:
    (directory / "one").unlink()
    assert cache.find_damage(directory / "record") == "one cannot be read (No such file or directory)"
    (directory / "one").mkdir()
    assert cache.find_damage(directory / "record") == "one cannot be read (Is a directory)"


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "3", "null", "[" * 100_000, "\udcff"])
def test_an_invalid_or_missing_record_is_damage(content: str, directory: Path) -> None:
    (directory / "record").write_text(content, errors="surrogateescape")
    assert cache.find_damage(directory / "record") in (
        "record cannot be read",
        "record names no files",
    )
    (directory / "record").unlink()
    assert cache.find_damage(directory / "record") == "record is missing"


@pytest.mark.parametrize(
    ("name", "expected"), [(r"\u0000", "record names a file "), (r"\ud800", "record cannot be read")]
)
def test_a_record_with_an_impossible_file_name_is_damage(name: str, expected: str, directory: Path) -> None:
    (directory / "record").write_text(f'{{"{name}": [1]}}')
    damage = cache.find_damage(directory / "record")
    assert damage is not None and damage.startswith(expected) and damage.isascii()
