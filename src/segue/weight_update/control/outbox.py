"""What control on rank 0 sends: messages to the frontend, and commands to the ranks.

The caller does the I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from msgspec import structs

from segue.messages.control import SchedulerMessage
from segue.messages.weight_update import RankCommand, RankReply, WeightAnswer

Command = TypeVar("Command", bound=RankCommand)
_SHOWN = 20  # problems listed in a message
# Called after the last reply: (replies by rank, their problems or "", time).
Then = Callable[[list[RankReply], str, float], None]


class Refusal(Exception):
    """A call of the frontend cannot be done; the text says why, and becomes the answer."""


class Outbox(Generic[Command]):
    """Collects messages and commands in the order of sending, and calls back when every rank has replied."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._num_commands = 0
        # By the number of a command: what follows, and the replies by rank, as long as some are missing.
        self._pending: dict[int, tuple[Then, dict[int, RankReply]]] = {}
        self._commands: list[Sequence[Command]] = []
        self._messages: list[SchedulerMessage] = []

    def send(self, message: SchedulerMessage) -> None:
        """Queue a message for the frontend."""
        self._messages.append(message)

    def answer(self, calls: Sequence[int], success: bool, message: str = "", **fields: Any) -> None:
        """Queue the same answer to each of these calls of the frontend."""
        self._messages += [WeightAnswer(call, success, message, fields) for call in calls]

    def command(self, *commands: Command, then: Then = lambda *_: None) -> None:
        """Queue one command for all ranks, or one for each rank; ``then`` is called after the last reply.

        All copies get the same number, by which the ranks' replies are matched to them.
        """
        self._num_commands += 1
        numbered = [structs.replace(each, call=self._num_commands) for each in commands]
        self._commands.append(numbered if len(numbered) > 1 else numbered * self.num_ranks)
        self._pending[self._num_commands] = then, {}

    def on_reply(self, reply: RankReply, now: float) -> None:
        """Take a rank's reply, and call back if it is the last; an unknown or repeated reply is ignored."""
        if reply.call not in self._pending:
            return
        then, replies = self._pending[reply.call]
        replies.setdefault(reply.rank, reply)
        if len(replies) == self.num_ranks:
            del self._pending[reply.call]
            ordered = [replies[rank] for rank in range(self.num_ranks)]
            then(ordered, _problems(ordered), now)

    def take(self) -> tuple[list[SchedulerMessage], list[Sequence[Command]]]:
        """Return what was queued, and empty the queues; each entry of commands has one per rank, in order."""
        queued = self._messages, self._commands
        self._messages, self._commands = [], []
        return queued


def _problems(replies: Sequence[RankReply]) -> str:
    """Joins the replies' errors to one text, each once if all ranks agree; empty if there are none."""
    distinct = {tuple(reply.errors) for reply in replies}
    if len(distinct) == 1:
        lines = list(replies[0].errors)
    else:
        lines = [f"rank {reply.rank}: {error}" for reply in replies for error in reply.errors]
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "; ".join(lines[:_SHOWN] + more)
