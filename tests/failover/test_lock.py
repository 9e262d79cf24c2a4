"""One engine of a cohort has the lock, the kernel passes it on, and no epoch is claimed twice."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from segue.errors import ConfigError, LockLostError
from segue.failover.lock import SLOT_BYTES, CohortLock, LockNote
from segue.options import MAX_OWN_URL
from tests.failover.lock_holder import LockHolder

URL = "http://127.0.0.1:1"
PASSED_ON_S = 30.0  # what a busy machine may add to the milliseconds that a lock takes to pass on


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "failover"


def number_of(lock: CohortLock) -> int:
    assert lock._file is not None
    return lock._file.number


def test_only_one_of_two_has_the_lock(directory: Path) -> None:
    first, second = CohortLock(directory, "default"), CohortLock(directory, "default")
    assert first.try_acquire()
    assert not second.try_acquire()
    first.release()
    assert second.try_acquire()
    second.release()


def test_cohorts_have_locks_of_their_own(directory: Path) -> None:
    first, second = CohortLock(directory, "a"), CohortLock(directory, "b")
    assert first.try_acquire()
    assert second.try_acquire()
    first.release()
    second.release()


def test_epochs_grow_and_the_note_names_the_holder(directory: Path) -> None:
    lock = CohortLock(directory, "default")
    assert lock.note() is None
    assert lock.try_acquire()
    assert lock.claim("engine-a", URL, 0) == 1
    assert lock.claim("engine-a", URL, 7) == 8
    lock.release()
    assert lock.note() == LockNote(engine="engine-a", pid=os.getpid(), epoch=8, url=URL)
    other = CohortLock(directory, "default")
    assert other.try_acquire()
    assert other.claim("engine-b", URL, 3) == 9
    assert other.is_ours()
    other.release()
    assert not other.is_ours()


def test_a_killed_holder_s_lock_passes_on_at_once(directory: Path) -> None:
    with LockHolder(directory) as holder, LockHolder(directory) as waiter:
        assert holder.ask("try") == "True"
        assert holder.ask("claim 0") == "1"
        assert waiter.ask("try") == "False"
        waiter.send("acquire")
        killed_at = time.monotonic()
        holder.kill()
        assert float(waiter.answer()) - killed_at < PASSED_ON_S
        assert waiter.ask("claim 0") == "2"


def test_a_forked_process_does_not_keep_the_lock(directory: Path) -> None:
    with LockHolder(directory) as holder, LockHolder(directory) as waiter:
        assert holder.ask("try") == "True"
        child = int(holder.ask("fork"))
        assert holder.ask("ours") == "True"  # the child has closed its copy, and the lock is still held
        assert waiter.ask("try") == "False"
        holder.process.kill()
        holder.process.wait()
        os.kill(child, 0)  # it lives
        assert waiter.ask("acquire")
        os.kill(child, signal.SIGKILL)


def test_a_process_that_was_forked_during_the_wait_does_not_keep_the_lock(directory: Path) -> None:
    with LockHolder(directory) as holder, LockHolder(directory) as waiter:
        lock = CohortLock(directory, "default")
        assert lock.try_acquire()
        assert holder.ask("wait") == "waits"
        _until(lambda: _is_waiting(holder.process.pid))
        child = int(holder.ask("fork"))
        lock.release()
        _until(lambda: holder.ask("ours") == "True")
        holder.process.kill()
        holder.process.wait()
        os.kill(child, 0)
        assert waiter.ask("acquire")
        os.kill(child, signal.SIGKILL)


def test_a_released_lock_is_free_although_a_forked_process_has_its_file(directory: Path) -> None:
    lock, other = CohortLock(directory, "default"), CohortLock(directory, "default")
    assert lock.try_acquire()
    copy = os.dup(number_of(lock))  # as a process has it that a C library forked
    lock.release()
    assert other.try_acquire()
    other.release()
    os.close(copy)


def test_while_a_foreign_copy_of_the_file_is_open_there_is_no_second_holder(directory: Path) -> None:
    lock, other = CohortLock(directory, "default"), CohortLock(directory, "default")
    assert lock.try_acquire()
    copy = os.dup(number_of(lock))
    os.close(number_of(lock))  # the holder is dead, and the copy is not
    assert not other.try_acquire()
    os.close(copy)
    assert other.try_acquire()
    other.release()


def test_the_holder_of_a_deleted_file_notices_that_it_was_replaced(directory: Path) -> None:
    with LockHolder(directory) as old, LockHolder(directory) as new:
        assert old.ask("try") == "True"
        assert old.ask("claim 4") == "5"
        assert old.ask("ours") == "True"
        (directory / "default.lock").unlink()
        assert old.ask("ours") == "False"
        assert new.ask("try") == "True"
        assert new.ask("claim 5") == "6"  # 5 is what discovery says
        assert old.ask("ours") == "False"
        assert old.ask("claim 9") == "lost"
        assert new.ask("ours") == "True"


def test_a_stopped_holder_that_goes_on_is_not_the_one_with_the_lock(directory: Path) -> None:
    with LockHolder(directory) as old, LockHolder(directory) as new:
        assert old.ask("try") == "True"
        assert old.ask("claim 0") == "1"
        old.signal(signal.SIGSTOP)
        assert new.ask("try") == "False"  # a stopped process still has its lock
        (directory / "default.lock").unlink()
        assert new.ask("try") == "True"
        assert new.ask("claim 1") == "2"
        old.signal(signal.SIGCONT)
        assert old.ask("ours") == "False"
        assert old.ask("claim 2") == "lost"
        assert CohortLock(directory, "default").note() is not None
        assert new.ask("ours") == "True"


def test_who_waits_for_a_file_that_is_made_anew_waits_for_the_new_one(directory: Path) -> None:
    with LockHolder(directory) as old, LockHolder(directory) as new, LockHolder(directory) as waiter:
        assert old.ask("try") == "True"
        waiter.send("acquire")
        _until(lambda: _is_waiting(waiter.process.pid))
        (directory / "default.lock").unlink()
        assert new.ask("try") == "True"
        old.kill()
        _until(lambda: _is_waiting(waiter.process.pid))  # for the new one
        assert CohortLock(directory, "default").try_acquire() is False
        new.kill()
        assert waiter.answer()
        assert waiter.ask("ours") == "True"


def test_who_waits_in_a_directory_that_is_removed_makes_it_anew_and_claims_a_higher_epoch(
    directory: Path,
) -> None:
    with LockHolder(directory) as old, LockHolder(directory) as waiter:
        assert old.ask("try") == "True"
        assert old.ask("claim 4") == "5"
        waiter.send("acquire")
        _until(lambda: _is_waiting(waiter.process.pid))
        shutil.rmtree(directory)
        assert old.ask("ours") == "False"
        old.kill()
        assert waiter.answer()
        assert waiter.ask("claim 0") == "6", "routers still know of 5, and would drop an engine with less"
        assert waiter.ask("ours") == "True"


def test_an_engine_whose_lock_s_file_is_gone_leaves_its_epoch(directory: Path) -> None:
    old = CohortLock(directory, "default")
    assert old.try_acquire()
    assert old.claim("a", URL, 4) == 5
    shutil.rmtree(directory)
    assert not old.is_ours()
    old.leave_epoch("a", URL)
    new = CohortLock(directory, "default")
    assert new.try_acquire(), "the epoch is there, and the lock is nobody's"
    assert new.claim("b", URL, 0) == 6
    assert new.is_ours()
    old.leave_epoch("a", URL)
    assert new.is_ours(), "a lower epoch changes nothing"
    assert new.claim("b", URL, 0) == 7
    new.release()
    old.release()


def test_the_longest_names_fit_into_a_note(directory: Path) -> None:
    lock = CohortLock(directory, "default")
    assert lock.try_acquire()
    url = "http://".ljust(MAX_OWN_URL, "x")
    assert lock.claim("e" * 63, url, 1 << 62) == (1 << 62) + 1
    assert (found := lock.note()) is not None and found.url == url
    lock.release()


def test_who_has_claimed_too_low_an_epoch_meanwhile_is_told(directory: Path) -> None:
    old, new = CohortLock(directory, "default"), CohortLock(directory, "default")
    assert old.try_acquire()
    assert old.claim("a", URL, 4) == 5
    shutil.rmtree(directory)
    directory.mkdir(mode=0o700)
    assert new.try_acquire()
    assert new.claim("b", URL, 0) == 1
    assert new.is_ours()
    old.leave_epoch("a", URL)
    assert not new.is_ours(), "so it ends, and its successor"
    new.release()
    third = CohortLock(directory, "default")
    assert third.try_acquire()
    assert third.claim("b", URL, 0) == 6
    third.release()
    old.release()


def test_a_lock_that_cannot_be_opened_is_an_error_that_names_it(directory: Path) -> None:
    lock = CohortLock(directory, "default")
    lock.path.mkdir()
    for take in (lock.acquire, lock.try_acquire):
        with pytest.raises(LockLostError, match=r"the lock, cannot be opened \(Is a directory"):
            take()


def test_a_killed_writer_s_epoch_is_never_claimed_again(directory: Path) -> None:
    seen: list[str] = []
    for _ in range(3):
        with LockHolder(directory) as holder:
            assert holder.ask("try") == "True"
            holder.send("claim-for-ever")
            seen += [holder.answer() for _ in range(50)]
            holder.process.kill()
            assert holder.process.stdout is not None
            rest = holder.process.stdout.read()  # `communicate` leaves out what is buffered
            seen += [line.strip() for line in rest.splitlines(keepends=True) if line.endswith("\n")]
    epochs = [int(each) for each in seen]
    assert epochs == sorted(set(epochs))


@pytest.mark.parametrize("written", [0, 1, 40, 60])
def test_an_entry_that_was_not_written_whole_does_not_count(directory: Path, written: int) -> None:
    lock = CohortLock(directory, "default")
    assert lock.try_acquire()
    assert [lock.claim("engine-a", URL, 0), lock.claim("engine-a", URL, 0)] == [1, 2]
    before = lock.path.read_bytes()
    assert lock.claim("engine-a", "http://127.0.0.1:2", 0) == 3
    after = lock.path.read_bytes()
    changed = next(at for at in range(len(after)) if after[at] != before[at]) // SLOT_BYTES * SLOT_BYTES
    torn = before[:changed] + after[changed : changed + written] + before[changed + written :]
    lock.path.write_bytes(torn)
    note = lock.note()
    assert note is not None
    assert note.epoch == 2
    lock.release()
    other = CohortLock(directory, "default")
    assert other.try_acquire()
    assert other.claim("engine-b", URL, 0) == 3
    other.release()


def test_a_note_that_is_too_long_is_refused(directory: Path) -> None:
    lock = CohortLock(directory, "default")
    assert lock.try_acquire()
    with pytest.raises(ValueError, match="at most 1023"):
        lock.claim("engine", "x" * SLOT_BYTES, 0)
    lock.release()


def test_nobody_claims_with_a_file_that_is_gone(directory: Path) -> None:
    lock = CohortLock(directory, "default")
    assert lock.try_acquire()
    lock.path.unlink()
    with pytest.raises(LockLostError, match=r"default\.lock was deleted"):
        lock.claim("engine", URL, 0)
    lock.release()


@pytest.mark.parametrize("cohort", ["", "../x", "a/b", ".hidden", "a b", "a.b", "Upper", "x" * 64])
def test_a_cohort_s_name_is_checked(directory: Path, cohort: str) -> None:
    with pytest.raises(ConfigError, match=r"cohort=.*63 of a-z"):
        CohortLock(directory, cohort)


# --- waiting ---


def _is_waiting(pid: int) -> bool:
    """Whether a process waits in `flock`: the kernel lists it behind the holder of the lock."""
    lines = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and f" {pid} " in line for line in lines)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
