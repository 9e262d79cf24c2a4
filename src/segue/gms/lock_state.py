"""The lock of the weights, as pure data: who loads them, who reads them, and which generation is current.

A *generation* is a complete set of weights, of all ranks of a model. A *cohort* is the engines that stand in
for each other: they have one lock, one current generation and one epoch. Cohorts with equal keys share a
generation that was loaded from files; one that came from a weight update belongs to its cohort alone.

A *lease* is what an engine was granted: to write a new generation (RW) or to read one (RO). Rank 0 asks for
it, the other ranks join it. Readers *pin* their generation, and a generation is freed once it is neither
pinned nor current.

A rank's weights are in *slabs*, which are numbers here. A lease that updates weights takes new slabs for what
changes, and shares the others with its parent, the current generation. A slab is freed once no generation and
no lease has it; one that a process may still write to is in *quarantine* until that process has gone.

Nothing here does I/O. :mod:`segue.gms.fsm` has the transitions.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import Literal

AskMode = Literal["rw", "ro", "rw_or_ro"]
DropReason = Literal["gone", "aborted", "abandoned", "stalled", "stale_epoch", "adopted"]
# committed: there are weights already. nothing: there are none to update. mismatch: they are of another key.
# pinned: a retired generation of the cohort is still read. stale_epoch: a newer engine has taken over.
# timeout: the wait is over. busy: the session waits already, or has a lease. lease: the lease is not one of
# this session. rank: the rank is taken, or the lease has no such rank. unsealed: a rank has not sealed its
# slabs. behind: the engine wants to update, but has not taken over another update yet. generation: there
# is no such committed generation. slabs: those of a sealed rank are neither its own nor the parent's. other:
# the cohort has other weights than an engine offers, which a newer engine has offered.
RefusalCode = Literal[
    "committed",
    "nothing",
    "mismatch",
    "pinned",
    "stale_epoch",
    "timeout",
    "busy",
    "lease",
    "rank",
    "unsealed",
    "behind",
    "generation",
    "slabs",
    "other",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskEvent:
    """Rank 0 of an engine asks for weights: to load them, to read them, or whichever is possible."""

    session: int
    cohort: str
    size: int  # ranks of the engine
    key: str  # equal exactly for equal weights: a hash of the manifest's identity
    mode: AskMode
    is_update: bool = False  # with mode "rw": the next generation, beside the current one
    epoch: int = 0  # of the engine, for an update
    deadline: float = inf  # until when it waits


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinEvent:
    """Another rank of the engine joins the lease of rank 0."""

    session: int
    lease: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeEvent:
    """A rank of a lease to write has got new slabs."""

    session: int
    lease: int
    slabs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatEvent:
    """A rank that loads reports its bytes so far."""

    session: int
    lease: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SealEvent:
    """A rank's slabs are complete, and cannot be written any more."""

    session: int
    lease: int
    slabs: tuple[int, ...]  # all of the rank's, in their order: new ones, and those of the parent


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipEvent:
    """Rank 0 commits: the generation becomes the cohort's current one, on all ranks at once."""

    session: int
    lease: int
    version: str = ""
    model_path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortEvent:
    """A rank gives its engine's lease to write up."""

    session: int
    lease: int
    is_abandoned: bool = False  # its process may still write to its slabs


@dataclass(frozen=True, slots=True, kw_only=True)
class RenameEvent:
    """An engine gives the current generation another version, by which its cohort alone calls it."""

    session: int
    cohort: str
    generation: int
    epoch: int  # of the engine
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PinEvent:
    """A session reads a generation from now on, as after an update of the engine that it stands in for."""

    session: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpinEvent:
    """A session does not read a generation any more."""

    session: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimEvent:
    """An engine of the cohort becomes its active one."""

    session: int
    cohort: str
    seen: int  # the highest epoch that the engine has found elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptEvent:
    """All ranks of an engine have offered the weights that they read, which the service has lost."""

    session: int  # of the rank that was last
    sessions: tuple[int, ...]  # of all its ranks
    cohort: str
    key: str
    is_loaded: bool
    slabs: tuple[tuple[int, ...], ...]  # of each rank
    epoch: int  # of the engine; 0: it does not serve
    version: str = ""  # by which the cohort calls them
    first_version: str = ""  # under which they were committed
    model_path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GoneEvent:
    """A session's connection has ended, and most likely its process."""

    session: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TickEvent:
    """Time has passed."""


WeightsEvent = (
    AskEvent
    | JoinEvent
    | TakeEvent
    | BeatEvent
    | SealEvent
    | FlipEvent
    | AbortEvent
    | RenameEvent
    | PinEvent
    | UnpinEvent
    | ClaimEvent
    | AdoptEvent
    | GoneEvent
    | TickEvent
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantEffect:
    """A session has a lease, or its rank has joined one."""

    session: int
    lease: int
    generation: int
    mode: Literal["rw", "ro"]
    parent: int | None = None  # the generation that an update starts from


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseEffect:
    """What a session asked for is not done."""

    session: int
    code: RefusalCode
    generation: int | None = None  # for mismatch and pinned: the generation that is in the way
    ranks: tuple[int, ...] = ()  # for unsealed: those that are missing
    sessions: tuple[int, ...] = ()  # for pinned: those that read


@dataclass(frozen=True, slots=True, kw_only=True)
class DoneEffect:
    """What a session asked for is done; ``number`` is the generation, or the epoch of a Claim."""

    session: int
    number: int
    missing: tuple[int, ...] = ()  # after SealEvent: the ranks that have not sealed yet


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitEffect:
    """A generation is its cohort's current one, or has another version; its ``readers`` are to be told."""

    cohort: str
    generation: int
    # Those that have the generation before, or this one if it was renamed. The lock does not know the cohorts
    # of sessions: those of other cohorts are not to be told.
    readers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DropEffect:
    """A generation that was being written is freed; its other ranks have lost the lease too."""

    generation: int
    lease: int
    sessions: tuple[int, ...]
    reason: DropReason
    slabs: tuple[int, ...]  # that are freed


@dataclass(frozen=True, slots=True, kw_only=True)
class ReclaimEffect:
    """A committed generation is freed: nobody reads it, and it is no cohort's current one."""

    generation: int
    slabs: tuple[int, ...]  # that are freed: no other generation has them


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseEffect:
    """Slabs leave the quarantine, and are freed: the process that may have written to them has gone."""

    slabs: tuple[int, ...]


WeightsEffect = (
    GrantEffect | RefuseEffect | DoneEffect | CommitEffect | DropEffect | ReclaimEffect | ReleaseEffect
)


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank of a lease."""

    session: int | None = None  # None: it has not joined, or has gone
    is_sealed: bool = False
    num_bytes: int = 0  # that it has loaded
    due: float = inf  # when its lease is lost unless it makes progress
    own: tuple[int, ...] = ()  # the slabs that were made for it
    slabs: tuple[int, ...] = ()  # once it is sealed: all of its slabs, in their order


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLease:
    """What an engine was granted."""

    cohort: str
    key: str
    generation: int
    ranks: tuple[RankState, ...]
    is_rw: bool
    parent: int | None = None  # the generation that an update starts from; None: loaded from files

    @property
    def sessions(self) -> tuple[int, ...]:
        """The sessions of the ranks that are there."""
        return tuple(rank.session for rank in self.ranks if rank.session is not None)

    def rank_of(self, session: int) -> int | None:
        """Return the rank of a session."""
        return next((number for number, rank in enumerate(self.ranks) if rank.session == session), None)

    def with_rank(self, number: int, rank: RankState) -> WeightsLease:
        """Return the lease with one rank replaced."""
        return replace(self, ranks=(*self.ranks[:number], rank, *self.ranks[number + 1 :]))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsGeneration:
    """A committed generation."""

    key: str
    is_loaded: bool  # from files, so that other cohorts may use it; otherwise it came from an update
    cohort: str  # that has made it
    slabs: tuple[tuple[int, ...], ...]  # of each rank
    version: str = ""  # of the weights, as it was committed; each cohort may call it by another one
    model_path: str | None = None  # where an update has read the weights; None: they came otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Cohort:
    """Engines that stand in for each other."""

    current: int | None = None  # generation
    version: str = ""  # of the current generation, as clients of this cohort call it
    epoch: int = 0  # of its active engine
    adopted_from: int = 0  # the epoch of the engine that has offered the current generation; 0: it was loaded


@dataclass(slots=True)
class WeightsState:
    """All leases, generations and waiting sessions. :func:`step` returns a new one and changes none."""

    cohorts: dict[str, Cohort] = field(default_factory=dict)
    generations: dict[int, WeightsGeneration] = field(default_factory=dict)  # the committed ones
    leases: dict[int, WeightsLease] = field(default_factory=dict)
    pins: frozenset[tuple[int, int]] = frozenset()  # (session, generation)
    waiting: tuple[AskEvent, ...] = ()  # in the order in which they came
    quarantine: frozenset[tuple[int, int]] = frozenset()  # (session that may still write to it, slab)
    serial: int = 0  # the last number of a lease or generation

    def copy(self) -> WeightsState:
        """Return a state that can be changed."""
        return WeightsState(
            dict(self.cohorts),
            dict(self.generations),
            dict(self.leases),
            self.pins,
            self.waiting,
            self.quarantine,
            self.serial,
        )

    def readers(self, generation: int) -> tuple[int, ...]:
        """Return the sessions that pin a generation."""
        return tuple(sorted(session for session, pinned in self.pins if pinned == generation))

    def version_in(self, cohort: str, generation: int) -> str:
        """Return the version by which a cohort calls a committed generation."""
        found = self.cohorts.get(cohort, Cohort())
        return found.version if found.current == generation else self.generations[generation].version

    def writer(self, cohort: str) -> WeightsLease | None:
        """Return the lease by which an engine of the cohort writes a generation."""
        return next((each for each in self.leases.values() if each.is_rw and each.cohort == cohort), None)

    def loader(self, key: str) -> WeightsLease | None:
        """Return the lease by which an engine of any cohort loads the weights of a key."""
        loading = (each for each in self.leases.values() if each.is_rw and each.parent is None)
        return next((each for each in loading if each.key == key), None)

    def retired(self, cohort: str) -> list[int]:
        """Return the generations that a cohort has made, and that are no cohort's current one any more."""
        currents = {each.current for each in self.cohorts.values()}
        made = (number for number, each in self.generations.items() if each.cohort == cohort)
        return [number for number in made if number not in currents]

    def slabs_in_generations(self) -> set[int]:
        """Return the slabs of all committed generations."""
        return {slab for each in self.generations.values() for rank in each.slabs for slab in rank}

    def loaded(self, key: str) -> int | None:
        """Return the generation that was loaded from files with a key."""
        found = (number for number, each in self.generations.items() if each.is_loaded and each.key == key)
        return next(found, None)
