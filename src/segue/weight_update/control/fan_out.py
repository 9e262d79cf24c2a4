"""Commands to all ranks, and the collection of their replies. The caller does the I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from segue.messages.weight_update import RankReply, WeightCommand

Then = Callable[[list[RankReply], float], None]  # called after the last reply: (replies by rank, time)
_SHOWN = 20  # problems listed in a message


@dataclass(slots=True)
class _PendingCommand:
    """A command that not every rank has replied to."""

    missing: set[int]  # ranks
    then: Then
    replies: list[RankReply] = field(default_factory=list)


class FanOut:
    """Sends commands to every rank, numbered as calls, and calls back when every rank has replied."""

    def __init__(self, num_ranks: int) -> None:
        self._ranks = range(num_ranks)
        self._num_calls = 0
        self._pending: dict[int, _PendingCommand] = {}  # by call
        self._commands: list[Sequence[WeightCommand]] = []

    def send(
        self,
        command: Callable[[int, int], WeightCommand],
        then: Then = lambda replies, now: None,
    ) -> None:
        """Queue one command per rank, ``command(rank, call)``; ``then`` is called after the last reply."""
        self._num_calls += 1
        self._pending[self._num_calls] = _PendingCommand(set(self._ranks), then)
        self._commands.append([command(rank, self._num_calls) for rank in self._ranks])

    def on_reply(self, reply: RankReply, now: float) -> None:
        """Take a rank's reply, and call back if it is the last; an unknown or repeated reply is ignored."""
        pending = self._pending.get(reply.call)
        if pending is None or reply.rank not in pending.missing:
            return
        pending.missing.remove(reply.rank)
        pending.replies.append(reply)
        if not pending.missing:
            del self._pending[reply.call]
            pending.then(sorted(pending.replies, key=lambda reply: reply.rank), now)

    def take(self) -> list[Sequence[WeightCommand]]:
        """Return the queued commands and empty the queue; each entry has one command per rank, in order."""
        commands, self._commands = self._commands, []
        return commands


def problems(replies: Sequence[RankReply]) -> str:
    """Joins the replies' errors to one text, each once if all ranks agree; empty if there are none."""
    distinct = {tuple(reply.errors) for reply in replies}
    if len(distinct) == 1:
        lines = list(replies[0].errors)
    else:
        lines = [f"rank {reply.rank}: {error}" for reply in replies for error in reply.errors]
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "; ".join(lines[:_SHOWN] + more)


def staging(replies: Sequence[RankReply]) -> dict[str, Any]:
    """Returns the kind of staging memory, and the bytes staged on all ranks together."""
    fields = replies[0].fields
    return {
        "place": fields.get("place", "device"),
        "num_bytes": sum(reply.fields.get("staging_bytes", 0) for reply in replies),
        "note": fields.get("note", ""),
    }
