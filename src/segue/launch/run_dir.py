"""The private directory with the sockets between a frontend and its workers."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

SOCKET_PATH_MAX = 100  # of the 107 bytes that the kernel allows for a path; the rest is a margin
OWNER = "owner"  # a file that the frontend keeps locked for as long as it lives


class RunDir:
    """The directory of one engine. Its path is short enough for sockets.

    The frontend alone removes it. If it was killed, the next frontend on the machine does: the kernel kills
    workers together with their frontend, which could leave one of them half-way through.
    """

    def __init__(self) -> None:
        directory = tempfile.mkdtemp(prefix="segue-")
        if len(os.fsencode(directory)) > SOCKET_PATH_MAX - len("/to_scheduler"):
            os.rmdir(directory)
            directory = tempfile.mkdtemp(prefix="segue-", dir="/tmp")
        self.path = Path(directory)
        # The file gets its name once it is locked, or another frontend would take it for one of the dead.
        unnamed = self.path / f"{OWNER}.new"
        self._owner = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._owner, fcntl.LOCK_EX)
        unnamed.rename(self.path / OWNER)
        remove_orphans(self.path.parent)

    def remove(self) -> None:
        """Remove the directory; may be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        owner, self._owner = self._owner, -1
        if owner >= 0:
            os.close(owner)


def remove_orphans(parent: Path) -> None:
    """Remove the directories of this user's frontends that were killed."""
    for owner in parent.glob(f"segue-*/{OWNER}"):
        with suppress(OSError):  # it is another user's, or its frontend lives, or it was just removed
            if owner.parent.stat().st_uid != os.geteuid():
                continue
            file = os.open(owner, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(owner.parent, ignore_errors=True)
            finally:
                os.close(file)
