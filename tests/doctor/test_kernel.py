"""Features of the kernel are tried; one that is not there is named with the options that need it."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

from segue.doctor import kernel
from segue.doctor.kernel import describe_kernel
from segue.memory import shared


def test_what_works_here_is_found() -> None:
    found = {each.name: each for each in describe_kernel()}
    assert found["kernel"].value == os.uname().release
    for name in ("memfd with seals", "pidfd", "flock"):
        assert (found[name].status, found[name].why) == ("ok", "")


def refuse(*_: object, **__: object) -> NoReturn:
    raise OSError(38, "Function not implemented")


@pytest.mark.parametrize(
    ("where", "name", "finding", "word"),
    [
        (os, "memfd_create", "memfd with seals", "--gms-dir"),
        (os, "pidfd_open", "pidfd", "--shadows"),
        (kernel.fcntl, "flock", "flock", "TMPDIR"),
        (shared, "SO_PEERPIDFD", "SO_PEERPIDFD", "--warm-kv"),
    ],
)
def test_what_is_not_there_says_what_needs_it(
    where: object, name: str, finding: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The number of a socket option that no kernel knows, or a call that the kernel refuses.
    monkeypatch.setattr(where, name, 12345 if name == "SO_PEERPIDFD" else refuse)
    found = next(each for each in describe_kernel() if each.name == finding)
    assert found.status == "missing"
    assert word in found.why + found.remedy and found.remedy
