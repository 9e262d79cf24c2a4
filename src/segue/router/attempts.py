"""How often a request is sent to another worker, and which workers it is not sent to again.

A request whose client has nothing yet is *retried* from its beginning. If the client has a part of the reply,
the request is *resumed*: the next worker gets the tokens that the client has, and goes on after them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from segue.errors import EngineDeadError, HandoverError
from segue.messages.leg import RETRYABLE
from segue.router.breaker import LegEnd
from segue.router.fleet import WorkerView

MOST_TRIES = 3  # workers, or pairs of workers, per request whose client has nothing yet
MOST_RESUMES = 3  # per request, if none of the legs gave MUCH_OUTPUT
MUCH_OUTPUT = 32  # tokens of a leg behind which it was hardly the request that made the worker fail
RETRIED = 503  # a worker that answers so has not begun with the request
# Codes of errors of a worker that does not serve any more, as far as it knows itself.
GONE = frozenset({"engine_dead", "draining", "stale_epoch"})


_Process = tuple[str, str]  # id and incarnation of a worker


def process_of(view: WorkerView) -> _Process:
    """Return what tells a worker's process from all others, also from later ones at its URL."""
    return view.id, view.record.incarnation


class FailureKind(Enum):
    """How a leg failed."""

    UNREACHED = auto()  # no connection to the worker came about
    LOST = auto()  # the worker died, or closed the connection
    HUNG = auto()  # nothing came from the worker for too long; it may go on
    REFUSED = auto()  # the worker answered that it does not take the request now
    BROKEN_OFF = auto()  # the worker had begun, and says that another one may succeed
    FINAL = auto()  # the worker's error is the client's


@dataclass(frozen=True, slots=True, kw_only=True)
class _Consequence:
    """What a failure means for the attempts that follow."""

    retries: bool  # whether another worker is tried
    counts: bool  # as one of the resumes; if not, the leg had not begun
    lasts: bool  # whether the process never gets the request again; if not, it may when no other one can


_CONSEQUENCES: Mapping[FailureKind, _Consequence] = {
    FailureKind.UNREACHED: _Consequence(retries=True, counts=False, lasts=True),
    FailureKind.LOST: _Consequence(retries=True, counts=True, lasts=True),
    FailureKind.HUNG: _Consequence(retries=True, counts=True, lasts=False),
    FailureKind.REFUSED: _Consequence(retries=True, counts=False, lasts=False),
    FailureKind.BROKEN_OFF: _Consequence(retries=True, counts=True, lasts=False),
    FailureKind.FINAL: _Consequence(retries=False, counts=True, lasts=False),
}


_BY_END: Mapping[LegEnd, FailureKind] = {
    "connect": FailureKind.UNREACHED,
    "cut": FailureKind.LOST,
    "client_left": FailureKind.LOST,
    "timeout": FailureKind.HUNG,
}


def kind_of(end: LegEnd, status: int, code: str | None, retryable: bool) -> FailureKind:
    """Returns how a leg failed.

    Args:
        end: how the connection's part of it ended.
        status: of the worker's answer instead of frames; 200: frames had begun.
        code: of the answer's error; None: it has none.
        retryable: what the frame `LegFailed` says, if there was one.
    """
    if end != "answered":
        return _BY_END[end]
    if code == EngineDeadError.code:
        return FailureKind.LOST
    if code == HandoverError.code:
        return FailureKind.BROKEN_OFF
    if status != 200:
        return FailureKind.REFUSED if status == RETRIED or code in RETRYABLE else FailureKind.FINAL
    return FailureKind.BROKEN_OFF if retryable else FailureKind.FINAL


@dataclass(slots=True)
class Attempts:
    """The attempts of one request so far."""

    tries: int = 0
    resumes: int = 0
    # Processes, by id and incarnation:
    _lost: set[_Process] = field(default_factory=set)
    _refused: set[_Process] = field(default_factory=set)  # they may take it later
    _broken_off: set[_Process] = field(default_factory=set)  # they failed, and may succeed again
    _gone: set[_Process] = field(default_factory=set)  # they do not serve any more

    def note(self, worker: WorkerView, kind: FailureKind, has_output: bool, code: str | None = None) -> bool:
        """Count a failure at a worker; returns whether there may be a further attempt.

        A worker of a cohort that had not begun with the request does not count: while another engine takes
        its place, there may be several such answers.

        Args:
            worker: as it was when the leg was sent.
            kind: of the failure.
            has_output: whether the client, or the router for it, has a part of the reply.
            code: of the worker's error; None: it said none.
        """
        consequence = _CONSEQUENCES[kind]
        self.avoid(worker, kind)
        if kind in (FailureKind.LOST, FailureKind.UNREACHED) or code in GONE:
            self._gone.add(process_of(worker))
        if has_output:
            self.resumes += consequence.counts
        else:
            self.tries += consequence.counts or not worker.record.cohort
        return consequence.retries and self.resumes <= MOST_RESUMES and self.tries < MOST_TRIES

    def progressed(self, num_tokens: int) -> None:
        """Note how many tokens the last leg gave; after much of the reply, resumes count from the beginning.

        A long reply may outlive many workers. One that makes workers fail is resumed at few of them.
        """
        if num_tokens >= MUCH_OUTPUT:
            self.resumes = 0

    def avoid(self, worker: WorkerView, kind: FailureKind) -> None:
        """Keep the request away from a worker, for as long as the kind of the failure says."""
        if _CONSEQUENCES[kind].lasts:
            self._lost.add(process_of(worker))
        else:
            (self._refused if kind is FailureKind.REFUSED else self._broken_off).add(process_of(worker))

    def avoided(self, views: Iterable[WorkerView]) -> frozenset[str]:
        """Returns the workers that do not get the request now.

        A process that was lost never gets it again; another process in its place may.
        """
        processes = self._lost | self._refused | self._broken_off
        return frozenset(view.id for view in views if process_of(view) in processes)

    def is_gone(self, view: WorkerView) -> bool:
        """Whether a process failed at this request in a way that only another one in its place can mend."""
        return process_of(view) in self._gone

    def forgive(self, *, refusals: bool) -> bool:
        """Allow workers again that may succeed now; returns whether there are any.

        Args:
            refusals: whether workers that refused the request are allowed too.
        """
        forgiven = self._broken_off | (self._refused if refusals else set())
        self._broken_off = set()
        if refusals:
            self._refused = set()
        return bool(forgiven)
