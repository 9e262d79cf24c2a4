"""The directory of files that processes lock: what is wrong with it is named."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from segue.errors import FailoverDirectoryError
from segue.lock_files import check_directory


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "failover"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_directory_that_others_may_write_to_is_refused(directory: Path, mode: int) -> None:
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(FailoverDirectoryError, match=rf"{mode:04o}.*chmod 700 {re.escape(str(directory))}"):
        check_directory(directory)


def test_a_directory_is_made_for_this_user_alone(directory: Path) -> None:
    check_directory(directory / "deeper")
    assert (directory / "deeper").stat().st_mode & 0o777 == 0o700


def test_a_file_in_the_directory_s_place_is_named(directory: Path) -> None:
    directory.write_text("")
    with pytest.raises(FailoverDirectoryError, match=r"failover_dir=.*cannot be made \(File exists\)"):
        check_directory(directory)


def _raises(number: int) -> Callable[[object, int], None]:
    def flock(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    return flock


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named(
    directory: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", _raises(number))
    with pytest.raises(FailoverDirectoryError, match=r"its file system \(\w+\) takes no lock.*/run"):
        check_directory(directory)


def test_a_file_system_that_ignores_locks_is_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda file, operation: None)
    with pytest.raises(FailoverDirectoryError, match="gives one lock to two processes"):
        check_directory(directory)
