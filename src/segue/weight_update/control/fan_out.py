"""Telling all ranks to do something, and hearing that each has done it; no sockets here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from segue.messages.weight_update import RankReply, WeightCommand

Then = Callable[[list[RankReply], float], None]  # what follows the last reply; they are in order of rank
_SHOWN = 20  # problems in a message


@dataclass(slots=True)
class _Asked:
    """A command whose replies are awaited."""

    missing: set[int]
    then: Then
    replies: list[RankReply] = field(default_factory=list)


class FanOut:
    """Commands for every rank, by call."""

    def __init__(self, num_ranks: int) -> None:
        self._ranks = range(num_ranks)
        self._num_calls = 0
        self._asked: dict[int, _Asked] = {}
        self._commands: list[Sequence[WeightCommand]] = []

    def send(
        self,
        command: Callable[[int, int], WeightCommand],
        then: Then = lambda replies, now: None,
    ) -> None:
        """Send every rank what ``command`` makes of the rank and of a call's number."""
        self._num_calls += 1
        self._asked[self._num_calls] = _Asked(set(self._ranks), then)
        self._commands.append([command(rank, self._num_calls) for rank in self._ranks])

    def on_reply(self, reply: RankReply, now: float) -> None:
        """A rank's reply; with the last one goes on what waited for it."""
        asked = self._asked.get(reply.call)
        if asked is None or reply.rank not in asked.missing:
            return
        asked.missing.remove(reply.rank)
        asked.replies.append(reply)
        if not asked.missing:
            del self._asked[reply.call]
            asked.then(sorted(asked.replies, key=lambda reply: reply.rank), now)

    def take(self) -> list[Sequence[WeightCommand]]:
        """What is to be sent, each entry one command a rank, in order."""
        commands, self._commands = self._commands, []
        return commands


def problems(replies: Sequence[RankReply]) -> str:
    """What is wrong, said once where all ranks say it; empty: nothing."""
    said = {tuple(reply.errors) for reply in replies}
    if len(said) == 1:
        lines = list(replies[0].errors)
    else:
        lines = [f"rank {reply.rank}: {error}" for reply in replies for error in reply.errors]
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "; ".join(lines[:_SHOWN] + more)


def staging(replies: Sequence[RankReply]) -> dict[str, Any]:
    """Where what was received waits, and how much of it there is on all ranks."""
    fields = replies[0].fields
    return {
        "place": fields.get("place", "device"),
        "num_bytes": sum(reply.fields.get("staging_bytes", 0) for reply in replies),
        "note": fields.get("note", ""),
    }
