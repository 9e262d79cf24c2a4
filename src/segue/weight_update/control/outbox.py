"""What the control of weight updates sends: messages to the frontend, and commands to the ranks.

The caller does the I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from segue.messages.control import SchedulerMessage
from segue.messages.weight_update import RankReply, WeightAnswer, WeightCommand

Then = Callable[[list[RankReply], float], None]  # called after the last reply: (replies by rank, time)


class Refusal(Exception):
    """A call of the frontend cannot be done; the text says why, and becomes the answer."""


@dataclass(slots=True)
class _PendingCommand:
    """A command that not every rank has replied to."""

    missing: set[int]  # ranks
    then: Then
    replies: list[RankReply] = field(default_factory=list)


class Outbox:
    """Collects messages and commands in the order of sending, and calls back when every rank has replied."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._num_commands = 0
        self._pending: dict[int, _PendingCommand] = {}  # by the number of the command
        self._commands: list[Sequence[WeightCommand]] = []
        self._messages: list[SchedulerMessage] = []

    def send(self, message: SchedulerMessage) -> None:
        """Queue a message for the frontend."""
        self._messages.append(message)

    def answer(self, calls: Sequence[int], success: bool, message: str = "", **fields: Any) -> None:
        """Queue the same answer to each of these calls of the frontend."""
        self._messages += [WeightAnswer(call, success, message, fields) for call in calls]

    def command(self, *commands: WeightCommand, then: Then = lambda replies, now: None) -> None:
        """Queue one command for all ranks, or one for each rank; ``then`` is called after the last reply."""
        self._num_commands += 1
        numbered = [structs.replace(each, call=self._num_commands) for each in commands]
        self._commands.append(numbered if len(numbered) > 1 else numbered * self.num_ranks)
        self._pending[self._num_commands] = _PendingCommand(set(range(self.num_ranks)), then)

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

    def take(self) -> tuple[list[SchedulerMessage], list[Sequence[WeightCommand]]]:
        """Return what was queued, and empty the queues; each entry of commands has one per rank, in order."""
        queued = self._messages, self._commands
        self._messages, self._commands = [], []
        return queued
