"""The client of the memory service: blocking calls, for the threads of a worker and for tools."""

from __future__ import annotations

from typing import Any

import msgspec

from segue.gms import messages as wire
from segue.gms.client_connection import TAKEOVER_REPLY_S
from segue.gms.client_kv import KVCalls
from segue.gms.client_weights import WeightCalls


class GmsClient(WeightCalls, KVCalls):
    """A session with the service. One call at a time: other threads wait for it.

    Every method raises MemoryServiceError if the service cannot be reached or refuses the call; `code` says
    why, and is "lost" if the connection has ended.
    """

    def claim(self, seen: int = 0) -> int:
        """Take the next epoch of the cohort, above `seen`."""
        message = wire.ClaimEpoch(call=self._next(), seen=seen)
        return self._one(message, wire.EpochClaimed, reply_s=TAKEOVER_REPLY_S).epoch

    def fence(self, below: int, *, kills: bool = False, wait_s: float = 0.0) -> wire.EnginesFenced:
        """Wait for the processes of engines that have served with an epoch below this one.

        With `kills` the service kills them, where the system allows it.
        """
        message = wire.FenceEngines(call=self._next(), below=below, kills=kills, wait_s=wait_s)
        return self._one(message, wire.EnginesFenced, wait_s=wait_s, reply_s=TAKEOVER_REPLY_S)

    def put_note(
        self, name: str, value: bytes, expect: bytes | None = None, *, keeps: bool = False
    ) -> bytes | None:
        """Set a note if it has the value `expect`; returns the value that it has then.

        With `keeps` the note, whoever has set it, stays until this session and all others that keep it end.
        """
        message = wire.PutNote(call=self._next(), name=name, value=value, expect=expect, keeps=keeps)
        return self._one(message, wire.NoteValue).value

    def note(self, name: str) -> bytes | None:
        """Return the value of a note."""
        return self._one(wire.GetNote(call=self._next(), name=name), wire.NoteValue).value

    def status(self) -> dict[str, Any]:
        """Return the state of the service, as `segue gms status --json` prints it."""
        found: dict[str, Any] = msgspec.json.decode(
            self._file(wire.GetServiceState(call=self._next()), wire.StateGiven)
        )
        return found

    def events(self, since: int = 0) -> list[wire.ServiceEvent]:
        """Return what has happened after event number `since`, as far as the service still has it."""
        return self._one(wire.GetServiceEvents(call=self._next(), since=since), wire.EventsGiven).events
