"""Memory that is released and taken again: which calls are done now, and when the engine may run.

    AWAKE -> STOPPING -> UNMAPPING -> HELD -> MAPPING -> AWAKE

A release first holds the engine, as a pause of mode ``retract`` does; then every rank gives the memory back.
The hold ends once all memory is there again and no tensor of the weights is missing. Calls are done one after
another. If a rank fails, the others take back what they have done, so that the ranks never differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from segue.errors import MemoryResumeError, MemorySaverError, SegueError
from segue.messages.control import SchedulerMessage
from segue.messages.memory import (
    MapMemory,
    MemoryAnswer,
    MemoryCommand,
    MemoryMoved,
    MemoryTag,
    ReleaseMemory,
    ResumeMemory,
    UnmapMemory,
)
from segue.messages.weight_update import RankReply
from segue.scheduler.pause import PauseState
from segue.weight_update.control.outbox import Outbox

if TYPE_CHECKING:
    from segue.scheduler.scheduler import Scheduler

LOST = "their memory was released: send all of them, or load them with /update_weights_from_disk"
BACKED_UP = "their memory is released, and a copy is in the host's memory: POST /wake_up brings them back"
_UNAVAILABLE = "the memory of the weights is released; POST /resume_memory_occupation first"
_OFF = "memory is neither released nor resumed, because the engine runs without --enable-memory-saver"
_UPDATING = "an update of the weights is open; complete or abort it before their memory is released"


class StandbyState(Enum):
    """Where the engine's large memory is."""

    AWAKE = auto()  # all of it is here; tensors of the weights may be missing
    STOPPING = auto()  # a release waits until no step is in flight and no request owns KV
    UNMAPPING = auto()  # the ranks give memory back
    HELD = auto()  # some of it is away
    MAPPING = auto()  # the ranks take memory again


# The states that may follow each state. UNMAPPING and MAPPING follow each other when a rank has failed.
_NEXT = {
    StandbyState.AWAKE: {StandbyState.STOPPING},
    StandbyState.STOPPING: {StandbyState.UNMAPPING},
    StandbyState.UNMAPPING: {StandbyState.HELD, StandbyState.MAPPING},
    StandbyState.HELD: {StandbyState.STOPPING, StandbyState.MAPPING},
    StandbyState.MAPPING: {StandbyState.AWAKE, StandbyState.HELD, StandbyState.UNMAPPING},
}


@dataclass(slots=True)
class _Move:
    """The call that is being done."""

    call: int
    tags: list[MemoryTag]
    backup: bool
    failed: str = ""  # why a rank has failed; what was done is then taken back


class Standby:
    """Releases and resumes the memory of one engine; :meth:`advance` returns what is to be sent."""

    def __init__(self, scheduler: Scheduler, num_ranks: int) -> None:
        self._scheduler = scheduler
        self._outbox = Outbox[MemoryCommand](num_ranks)
        self.state = StandbyState.AWAKE
        self.away: set[MemoryTag] = set()  # memory that the ranks have given back
        self._has_backup = False  # whether the weights that are away come back with their memory
        self._calls: deque[ReleaseMemory | ResumeMemory] = deque()
        self._move: _Move | None = None

    def request(self, message: ReleaseMemory | ResumeMemory) -> None:
        """Take a call; :meth:`advance` returns its answer, now or later."""
        self._calls.append(message)

    def on_rank(self, reply: MemoryMoved, now: float) -> None:
        """Take a rank's reply to a command."""
        self._outbox.on_reply(reply, now)

    def advance(self) -> tuple[list[SchedulerMessage], list[Sequence[MemoryCommand]]]:
        """Do what can be done now. Call it after `PauseControl.advance`, because a hold takes effect there.

        Returns:
            The messages for the frontend, and the commands for the ranks, one per rank in each entry; both
            are in the order of sending.
        """
        while self._calls and self._move is None:
            self._begin(self._calls.popleft())
        if self.state is StandbyState.STOPPING and self._stands_still:
            self._unmap()
        self._let_go()
        return self._outbox.take()

    @property
    def _stands_still(self) -> bool:
        return self._scheduler.control.state is PauseState.PAUSED

    def _begin(self, call: ReleaseMemory | ResumeMemory) -> None:
        """Begin to do a call, or answer it if there is nothing to do, or if it cannot be done."""
        scheduler, is_release = self._scheduler, isinstance(call, ReleaseMemory)
        tags = sorted({tag for tag in call.tags if (tag in self.away) != is_release})
        if not scheduler.config.enable_memory_saver:
            self._answer(call.call, MemorySaverError(_OFF))
        elif not tags:
            self._outbox.send(MemoryAnswer(call.call, tags=[], message="Nothing was to be done."))
        elif is_release and "weights" in tags and scheduler.weights.is_updating:
            self._answer(call.call, MemorySaverError(_UPDATING))
        elif isinstance(call, ReleaseMemory):
            self._move = _Move(call.call, tags, call.backup and scheduler.weights.missing is None)
            if "weights" in tags:
                scheduler.weights.unavailable = _UNAVAILABLE
            self._enter(StandbyState.STOPPING)
            scheduler.control.hold("memory_release", "retract")
        else:
            self._move = _Move(call.call, tags, self._has_backup)
            self._map(self._move)

    def _unmap(self) -> None:
        """Nothing runs: have the ranks give the memory back. KV that goes is forgotten first."""
        move = self._move
        assert move is not None
        if "kv_cache" in move.tags and "kv_cache" not in self.away:
            self._scheduler.forget_cache()
        self._enter(StandbyState.UNMAPPING)
        self._outbox.command(UnmapMemory(tags=move.tags, backup=move.backup), then=self._on_unmapped)

    def _map(self, move: _Move) -> None:
        self._enter(StandbyState.MAPPING)
        self._outbox.command(MapMemory(tags=move.tags), then=self._on_mapped)

    def _on_unmapped(self, replies: list[RankReply], wrong: str, now: float) -> None:
        """Every rank has replied to `UnmapMemory`."""
        move, weights = self._move, self._scheduler.weights
        assert move is not None
        if wrong and not move.failed:
            move.failed = wrong
            self._map(move)
            return
        self.away.update(move.tags)
        if "weights" in move.tags:
            self._has_backup = move.backup
            weights.missing = BACKED_UP if move.backup else LOST
        self._enter(StandbyState.HELD)
        self._end(replies)

    def _on_mapped(self, replies: list[RankReply], wrong: str, now: float) -> None:
        """Every rank has replied to `MapMemory`."""
        move, weights = self._move, self._scheduler.weights
        assert move is not None
        if wrong and not move.failed:
            move.failed = wrong
            self._unmap()
            return
        if wrong:  # a release has failed, and what was released cannot be taken again: it counts as released
            self._on_unmapped(replies, wrong, now)
            return
        self.away.difference_update(move.tags)
        if "weights" in move.tags:
            weights.unavailable = None
            weights.missing = None if move.backup else weights.missing or LOST
        self._enter(StandbyState.HELD if self.away else StandbyState.AWAKE)
        self._let_go()
        self._end(replies)

    def _let_go(self) -> None:
        """End the hold if all memory is here and no tensor is missing."""
        s = self._scheduler
        is_whole = self.state is StandbyState.AWAKE and s.weights.missing is None
        if is_whole and "memory_release" in s.control.holders:
            s.control.release("memory_release")
            self._outbox.send(s.output())

    def _end(self, replies: list[RankReply]) -> None:
        """Answer the call that was done, or has failed, and show what is released now."""
        move, self._move = self._move, None
        assert move is not None
        self._outbox.send(self._scheduler.output())
        if move.failed:
            self._answer(move.call, MemoryResumeError(move.failed))
            return
        missing = self._scheduler.weights.missing
        self._outbox.send(
            MemoryAnswer(
                move.call,
                tags=move.tags,
                num_bytes=sum(reply.fields.get("num_bytes", 0) for reply in replies),
                message="" if missing is None else f"The weights are not there: {missing}.",
            )
        )

    def _answer(self, call: int, error: SegueError) -> None:
        self._outbox.send(MemoryAnswer(call, tags=[], error=type(error).__name__, message=error.message))

    def _enter(self, state: StandbyState) -> None:
        assert state in _NEXT[self.state], f"memory that is {self.state.name} cannot become {state.name}"
        self.state = state
