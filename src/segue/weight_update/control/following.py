"""Serves the generations of shared weights that other engines of the cohort commit.

    IDLE -> FETCHING -> HOLDING -> ADOPTING -> IDLE

The ranks fetch a generation and check its bytes while generation goes on; then it is held, and every rank
serves the new weights between the same two steps. An engine that has nothing to do is held from the start:
one that is about to take the place of another one shall not serve weights that are retired.
"""

from __future__ import annotations

from enum import Enum, auto

from segue.errors import NewWeightsError
from segue.logs import logger
from segue.messages.weight_update import (
    AdoptGeneration,
    DropGeneration,
    FetchGeneration,
    RankReply,
    WeightCommand,
    WeightsChanged,
)
from segue.weight_update.control.outbox import Outbox
from segue.weight_update.control.port import Port
from segue.weight_update.control.session import TO_BE_COMMITTED
from segue.weight_update.control.state_machine import WeightMachine


class FollowPhase(Enum):
    """How far the engine is with weights of another one; ``_NEXT`` says which phases may follow."""

    IDLE = auto()
    FETCHING = auto()  # the ranks get the slabs, and check them
    HOLDING = auto()  # they have them; the steps in flight end
    ADOPTING = auto()  # each rank serves them now


_NEXT = {
    FollowPhase.IDLE: (FollowPhase.FETCHING,),
    FollowPhase.FETCHING: (FollowPhase.HOLDING, FollowPhase.IDLE),
    FollowPhase.HOLDING: (FollowPhase.ADOPTING,),
    FollowPhase.ADOPTING: (FollowPhase.IDLE,),
}


class FollowMachine:
    """Leads the ranks of one engine to the current generation of the cohort."""

    def __init__(self, port: Port, outbox: Outbox[WeightCommand], machine: WeightMachine) -> None:
        self._port = port
        self._outbox = outbox
        self._machine = machine
        self._phase = FollowPhase.IDLE
        self._next: WeightsChanged | None = None  # the last notice, as long as it is not done
        self._present: WeightsChanged | None = None  # that is being done

    @property
    def is_busy(self) -> bool:
        """Whether the engine does not serve the current generation yet."""
        return self._next is not None or self._phase is not FollowPhase.IDLE

    def on_changed(self, notice: WeightsChanged) -> None:
        """Take a notice of the memory service; :meth:`advance` does the rest."""
        self._next = notice

    def advance(self, now: float) -> None:
        """Begin to follow if nothing else changes the weights, and adopt them once no step is in flight."""
        if self._phase is FollowPhase.HOLDING and self._port.stands_still:
            self._enter(FollowPhase.ADOPTING)
            self._outbox.command(AdoptGeneration(), then=self._on_adopted)
        elif self._phase is FollowPhase.IDLE and self._next is not None:
            self._begin(self._next, now)

    def _begin(self, notice: WeightsChanged, now: float) -> None:
        session = self._machine.session
        if session is not None:
            if session.phase not in TO_BE_COMMITTED:
                self._machine.abort(session, "another engine of the cohort has changed the weights", now)
            return  # if it is to be committed, the memory service refuses that
        if self._machine.num_discarding:  # threads of the ranks may still read the served weights
            return
        self._next = None
        if notice.generation == self._machine.generation:  # it has got another version
            self._serve(notice)
            return
        self._present = notice
        if not self._port.has_work:
            self._port.hold("in_place")
        self._enter(FollowPhase.FETCHING)
        self._outbox.command(FetchGeneration(generation=notice.generation), then=self._on_fetched)

    def _on_fetched(self, replies: list[RankReply], wrong: str, now: float) -> None:
        """Every rank has the slabs; or the service is lost, or has newer weights already."""
        if not wrong:
            self._enter(FollowPhase.HOLDING)
            self._port.hold("in_place")
            return
        is_lost = all(reply.fields.get("is_lost", False) for reply in replies if reply.errors)
        if self._next is None and not is_lost:
            raise NewWeightsError(wrong)
        logger.warning("the weights of another engine are not taken over yet: %s", wrong)
        self._outbox.command(DropGeneration())
        self._enter(FollowPhase.IDLE)
        self._port.release()

    def _on_adopted(self, replies: list[RankReply], wrong: str, now: float) -> None:
        """Every rank serves the new weights."""
        if wrong:
            raise NewWeightsError(wrong)
        notice = self._present
        assert notice is not None
        self._enter(FollowPhase.IDLE)
        self._port.commit(notice.version, flush_cache=False)
        self._machine.note_generation(replies)
        self._port.release()
        self._serve(notice)

    def _serve(self, notice: WeightsChanged) -> None:
        """Show the version of what is served now."""
        self._port.weight_version = notice.version
        self._machine.note_path(notice.model_path)
        self._outbox.send(self._machine.notice())

    def _enter(self, phase: FollowPhase) -> None:
        assert phase in _NEXT[self._phase], f"{self._phase.name} -> {phase.name}"
        self._phase = phase
