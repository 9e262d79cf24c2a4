"""A pause by a user, as the engines of a cohort hand it on: the next one starts paused, for what is left.

The note is a file in the failover directory. It is there before the user's call is answered, and a pause that
was ended has none. Deadlines are of the clock that counts from the boot of the host, sleep included.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from segue.host import boot_id
from segue.messages.control import PauseMode


class ControlNote(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine that serves was told to do."""

    epoch: int  # of that engine
    mode: PauseMode
    until: float | None  # in seconds since the boot; None: until somebody continues
    boot: str  # which boot


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ControlNote).decode


class ControlNotes:
    """The note of a cohort, as one of its engines sees it."""

    def __init__(self, directory: Path, cohort: str) -> None:
        self._path = directory / f"control-{cohort}.json"

    def put(self, epoch: int, mode: PauseMode, ttl_s: float | None) -> None:
        """Note a pause that has taken effect, and ends after `ttl_s` seconds; None: not by itself."""
        if self._is_ours(epoch):
            until = None if ttl_s is None else _now() + ttl_s
            unnamed = self._path.with_suffix(f".{os.getpid()}")
            unnamed.write_bytes(_encode(ControlNote(epoch=epoch, mode=mode, until=until, boot=boot_id())))
            unnamed.rename(self._path)

    def remove(self, epoch: int) -> None:
        """Note that generation goes on."""
        if self._is_ours(epoch):
            self._path.unlink(missing_ok=True)

    def left(self) -> tuple[PauseMode, float | None] | None:
        """Returns the pause that an engine begins with, and the seconds that are left of it; None: no pause.

        Its KV is empty, so that what would be kept in place is computed again.
        """
        note = self._read()
        if note is None or note.boot != boot_id():
            return None
        mode: PauseMode = "retract" if note.mode == "in_place" else note.mode
        if note.until is None:
            return mode, None
        left = note.until - _now()
        return (mode, left) if left > 0 else None

    def _is_ours(self, epoch: int) -> bool:
        """Whether no engine with a higher epoch has left a note."""
        note = self._read()
        return note is None or note.epoch <= epoch

    def _read(self) -> ControlNote | None:
        with suppress(OSError, msgspec.DecodeError):
            return _decode(self._path.read_bytes())
        return None


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
