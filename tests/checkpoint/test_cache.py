import fcntl
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from segue.checkpoint import cache, model_files
from segue.errors import CacheDirectoryError, ModelFileError, WeightSyncError

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


def write(text: str, directory: Path, names: str = "f") -> None:
    for name in names:
        (directory / name).write_text(text)


def test_a_published_file_replaces_the_old_one_and_others_stay(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "directory"
    cache.publish(directory / "f", partial(write, "one", names="fg"))
    cache.publish(directory / "f", partial(write, "two"))
    assert [(directory / name).read_text() for name in "fg"] == ["two", "one"]
    assert sorted(os.listdir(directory)) == ["f", "g"]


@pytest.mark.parametrize("error", [ValueError("no more"), ZeroDivisionError("no more")], ids=repr)
def test_a_failed_write_leaves_the_old_file(tmp_path: Path, error: Exception) -> None:
    cache.publish(tmp_path / "f", partial(write, "old"))

    def fail(directory: Path) -> None:
        write("half", directory, "fg")
        raise error

    with pytest.raises(type(error), match="no more"):
        cache.publish(tmp_path / "f", fail)
    assert (tmp_path / "f").read_text() == "old"
    assert os.listdir(tmp_path) == ["f"]


def test_a_published_file_can_be_read_by_others(tmp_path: Path) -> None:
    def private(directory: Path) -> None:
        write("", directory)
        (directory / "f").chmod(0o600)

    cache.publish(tmp_path / "directory" / "f", private)
    assert (tmp_path / "directory" / "f").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "directory").stat().st_mode & 0o777 == 0o755


def test_a_file_appears_complete(tmp_path: Path) -> None:
    def fill(directory: Path) -> None:
        write("half", directory)
        assert not (tmp_path / "f").exists()
        write("whole", directory)

    cache.publish(tmp_path / "f", fill)
    assert (tmp_path / "f").read_text() == "whole"


def test_processes_that_publish_the_same_files_at_once_all_succeed(tmp_path: Path) -> None:
    run_together(8, lambda number: cache.publish(tmp_path / "a" / "x", partial(write, "same", names="xyz")))
    assert {(tmp_path / "a" / name).read_text() for name in "xyz"} == {"same"}
    assert sorted(os.listdir(tmp_path / "a")) == ["x", "y", "z"]


def test_of_racing_makers_one_makes_the_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    makers = []

    def make(number: int) -> None:
        def fill(directory: Path) -> None:
            makers.append(number)
            write(str(number), directory, "xyz")

        cache.make_unless_intact(tmp_path / "a" / "x", tmp_path / "a" / "record", fill, tmp_path)

    run_together(8, make)
    assert {(tmp_path / "a" / name).read_text() for name in "xyz"} == {str(makers[0])}
    assert len(makers) == 1 and not caplog.records
    assert sorted(os.listdir(tmp_path / "a")) == [".record.lock", "record", "x", "y", "z"]


def test_a_held_lock_cannot_be_taken(tmp_path: Path) -> None:
    with cache.exclusive(tmp_path / "target"):
        (lock,) = tmp_path.iterdir()
        with lock.open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with lock.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_locks_of_two_targets_in_one_directory_are_independent(tmp_path: Path) -> None:
    def fill(directory: Path) -> None:
        write("0", directory, "a")
        cache.make_unless_intact(
            tmp_path / "b", tmp_path / "b.record", partial(write, "1", names="b"), tmp_path
        )

    cache.make_unless_intact(tmp_path / "a", tmp_path / "a.record", fill, tmp_path)
    assert [(tmp_path / name).read_text() for name in "ab"] == ["0", "1"]


def test_a_wait_for_a_lock_ends_with_the_reading(tmp_path: Path) -> None:
    cancelled = threading.Event()
    waits = threading.Event()

    def is_cancelled() -> bool:
        waits.set()
        return cancelled.is_set()

    def wait() -> None:
        rules = model_files.Reading(is_cancelled=is_cancelled)
        with model_files.reading(rules), pytest.raises(WeightSyncError), cache.exclusive(tmp_path / "f"):
            pytest.fail("two have the lock")

    with cache.exclusive(tmp_path / "f"):
        thread = ThreadPoolExecutor(1).submit(wait)
        assert waits.wait(60)
        cancelled.set()
        thread.result(60)


def test_the_next_lock_removes_temporary_files_of_a_killed_process(tmp_path: Path) -> None:
    program = """
        import os, sys
        from pathlib import Path
        from segue.checkpoint import cache

        def fill(directory):
            (directory / "half").touch()
            os.kill(os.getpid(), 9)

        cache.publish(Path(sys.argv[1]) / "half", fill)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], timeout=60)
    (left,) = tmp_path.iterdir()
    assert os.listdir(left) == ["half"]
    (tmp_path / "other").touch()
    for _ in range(2):
        with cache.exclusive(tmp_path / "half"):
            assert sorted(os.listdir(tmp_path)) == [".half.lock", "other"]


@pytest.mark.parametrize("place", ["occupied", "occupied/below"])
def test_an_unwritable_directory_is_named_with_the_remedy(tmp_path: Path, place: str) -> None:
    (tmp_path / "occupied").write_text("")
    directory = tmp_path / place
    with pytest.raises(CacheDirectoryError, match=f"{directory}: .*SEGUE_CACHE_DIR"):
        cache.publish(directory / "f", lambda path: None)
    with (
        pytest.raises(CacheDirectoryError, match=f"{directory}: .*SEGUE_CACHE_DIR"),
        cache.exclusive(directory / "f"),
    ):
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
