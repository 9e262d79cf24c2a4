from __future__ import annotations

import os
import threading
from pathlib import Path

from segue.failover.lock import CohortLock
from segue.failover.standby import count_standbys, has_standby, remove_unheld, sign_of
from tests.support.shadows import wait_until


def test_an_engine_that_waits_is_seen_until_it_ends(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    assert not has_standby(tmp_path, "default")
    sign = sign_of(tmp_path, "default", "engine-b")
    sign.acquire()
    assert has_standby(tmp_path, "default")
    assert not has_standby(tmp_path, "other")
    sign.discard()
    assert not has_standby(tmp_path, "default")


def test_several_may_wait(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    signs = [sign_of(tmp_path, "default", name) for name in ("b", "c")]
    for sign in signs:
        sign.acquire()
    assert count_standbys(tmp_path, "default") == 2
    signs[0].release()
    assert count_standbys(tmp_path, "default") == 1
    assert has_standby(tmp_path, "default")
    signs[1].release()
    assert not has_standby(tmp_path, "default")


def test_the_files_of_engines_that_wait_no_more_are_deleted(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)

    def files() -> int:
        return len(list(tmp_path.glob("standby-*")))

    waits, dead = sign_of(tmp_path, "default", "a"), sign_of(tmp_path, "default", "b")
    elsewhere = sign_of(tmp_path, "other", "a")
    for sign in (waits, dead, elsewhere):
        sign.acquire()
    dead.release()  # as the kernel does
    elsewhere.release()
    assert files() == 3
    assert count_standbys(tmp_path, "default") == 1
    assert files() == 2, "that of another cohort is not asked for"
    remove_unheld(tmp_path)
    assert files() == 1
    assert has_standby(tmp_path, "default"), "the one that waits still does"
    waits.discard()
    assert files() == 0


def test_the_locks_of_cohorts_are_left_alone_whatever_they_are_called(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    names = ["standby", "standby-1", "standby-west-coast", f"standby-{'0' * 8}-1"]
    for name in names:
        lock = CohortLock(tmp_path, name)
        lock.acquire()
        assert lock.claim("a", "http://127.0.0.1:1", 6) == 7
        lock.release()
    remove_unheld(tmp_path)
    for name in names:
        note = CohortLock(tmp_path, name).note()
        assert note is not None and note.epoch == 7, "the epoch that was claimed is still known"


def test_a_file_that_is_deleted_while_somebody_opens_it_is_made_anew(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    held = sign_of(tmp_path, "default", "a")
    held.acquire()
    late = sign_of(tmp_path, "default", "a")
    waiting = threading.Thread(target=late.acquire, daemon=True)
    waiting.start()
    wait_until(_waits_for_a_lock, "it waits")
    held.discard()
    waiting.join(60)
    assert late.is_held and late.path.exists() and has_standby(tmp_path, "default")
    late.discard()


def _waits_for_a_lock() -> bool:
    """Whether a thread of this process waits for a lock of a file."""
    lines = Path("/proc/locks").read_text().splitlines()
    return any(" -> FLOCK" in line and f" {os.getpid()} " in line for line in lines)
