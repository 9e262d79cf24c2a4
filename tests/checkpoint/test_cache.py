import fcntl
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from segue.checkpoint import cache
from segue.errors import CacheDirectoryError, ModelFileError

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def run_together(count: int, work: Callable[[int], None]) -> None:
    """Calls `work(number)` in threads that start at the same moment, and raises the first error."""
    barrier = threading.Barrier(count)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        barrier.wait()
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def write(text: str, path: Path) -> None:
    path.write_text(text)


def test_a_published_file_replaces_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "new" / "file"
    for text in ("one", "two"):
        cache.publish_file(target, partial(write, text))
    assert target.read_text() == "two"
    assert os.listdir(target.parent) == ["file"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("old")

    def fail(path: Path) -> None:
        path.write_text("half")
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        cache.publish_file(target, fail)
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_published_file_can_be_read_by_others(tmp_path: Path) -> None:
    cache.publish_file(tmp_path / "file", Path.touch)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644


def test_a_directory_appears_complete(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b"

    def fill(directory: Path) -> None:
        (directory / "file").write_text("x")
        assert not target.exists()

    cache.publish_directory(target, fill)
    assert (target / "file").read_text() == "x"
    assert target.stat().st_mode & 0o777 == 0o755
    assert os.listdir(target.parent) == ["b"]


def test_a_failed_directory_does_not_appear(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        cache.publish_directory(tmp_path / "a", lambda directory: (directory / str(1 // 0)).touch())
    assert os.listdir(tmp_path) == []


def test_of_racing_directories_one_stays_complete(tmp_path: Path) -> None:
    target = tmp_path / "a"

    def publish(number: int) -> None:
        def fill(directory: Path) -> None:
            for name in "xyz":
                (directory / name).write_text(str(number))

        cache.publish_directory(target, fill)

    run_together(8, publish)
    assert len({(target / name).read_text() for name in "xyz"}) == 1
    assert os.listdir(tmp_path) == ["a"]


def test_a_held_lock_cannot_be_taken(tmp_path: Path) -> None:
    with cache.exclusive(tmp_path / "target"):
        (lock,) = tmp_path.iterdir()
        with lock.open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with lock.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_next_lock_removes_temporary_files_of_a_killed_process(tmp_path: Path) -> None:
    left, other = tmp_path / ".target.abc123", tmp_path / ".target2.abc123"
    for path in (left, other):
        path.write_text("half")
    directory = tmp_path / ".target.def456"
    directory.mkdir()
    (directory / "file").touch()
    for _ in range(2):
        with cache.exclusive(tmp_path / "target"):
            assert not left.exists() and not directory.exists()
            assert other.exists()
            assert (tmp_path / ".target.lock").exists()


@pytest.mark.parametrize("place", ["occupied/file", "occupied/below/file"])
def test_an_unwritable_directory_is_named_with_the_remedy(tmp_path: Path, place: str) -> None:
    (tmp_path / "occupied").write_text("")
    target = tmp_path / place
    for publish in (cache.publish_file, cache.publish_directory):
        with pytest.raises(CacheDirectoryError, match=f"{target.parent}: .*SEGUE_CACHE_DIR"):
            publish(target, lambda path: None)
    with pytest.raises(CacheDirectoryError, match="SEGUE_CACHE_DIR"), cache.exclusive(target):
        pass


def test_hash_is_the_sha256(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert cache.sha256_of(tmp_path / "file", tmp_path / "cache") == EMPTY


def test_hash_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    cache.sha256_of(tmp_path / "file", tmp_path / "cache")
    monkeypatch.setattr(cache, "sha256", lambda path: pytest.fail("hashed again"))
    assert cache.sha256_of(tmp_path / "file", tmp_path / "cache") == EMPTY


@pytest.mark.parametrize("content", ["", "1"])
def test_a_file_that_changed_is_hashed_again(tmp_path: Path, content: str) -> None:
    path = tmp_path / "file"
    path.write_text("0")
    before = cache.sha256_of(path, tmp_path / "cache")
    status = path.stat()
    path.write_text(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert cache.sha256_of(path, tmp_path / "cache") != before


def test_a_file_that_changed_and_got_its_old_time_back_is_hashed_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("0")
    before, status = cache.sha256_of(path, tmp_path / "cache"), path.stat()
    deadline = time.monotonic() + 10
    # A file system's clock ticks about 100 times per second.
    while path.stat().st_ctime_ns == status.st_ctime_ns:
        assert time.monotonic() < deadline
        path.write_text("1")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert cache.sha256_of(path, tmp_path / "cache") != before


@pytest.mark.parametrize("text", ["../../elsewhere", EMPTY.upper(), f"{EMPTY}\\n", EMPTY[:-1]])
def test_a_remembered_text_that_is_no_hash_is_ignored(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache.sha256_of(tmp_path / "file", tmp_path / "cache")
    (record,) = (tmp_path / "cache" / "hashes").iterdir()
    record.write_text(record.read_text().replace(EMPTY, text))
    assert cache.sha256_of(tmp_path / "file", tmp_path / "cache") == EMPTY


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"sha256": 3}', "[" * 100_000])
def test_a_broken_record_is_ignored(tmp_path: Path, content: str) -> None:
    (tmp_path / "file").touch()
    cache.sha256_of(tmp_path / "file", tmp_path / "cache")
    (record,) = (tmp_path / "cache" / "hashes").iterdir()
    record.write_text(content)
    assert cache.sha256_of(tmp_path / "file", tmp_path / "cache") == EMPTY


def test_a_hash_that_cannot_be_remembered_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert cache.sha256_of(tmp_path / "file", tmp_path / "file") == EMPTY


def test_a_file_whose_name_is_no_valid_text_has_a_hash(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/one\x80"))
    path.touch()
    for _ in range(2):
        assert cache.sha256_of(path, tmp_path / "cache") == EMPTY
    assert len(list((tmp_path / "cache" / "hashes").iterdir())) == 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=f"{tmp_path / 'file'}: No such file"):
        cache.sha256_of(tmp_path / "file", tmp_path)
