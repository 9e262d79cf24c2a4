"""The lease of KV memory as data: its state, the events that change it, and the effects that follow."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from math import inf
from typing import Literal


class KVPhase(Enum):
    """The states of the memory that the next engine may get."""

    EMPTY = auto()  # there is none
    MAKING = auto()  # new memory is being taken from the device
    LEASED = auto()  # an engine writes to it
    QUARANTINED = auto()  # its engine is disconnected, and its process may still write
    SHAPED = auto()  # it is free, and has the shape that the cohort's engines use


# stale_epoch: a newer engine has asked, or the asker has claimed a higher epoch. unclaimed: the engine of the
# asker has not claimed the epoch. fence: the process before has not ended, and the device has no memory for a
# second set. memory: the device has too little. held: the holder lives, and has the same epoch.
KVRefusalCode = Literal["stale_epoch", "unclaimed", "fence", "memory", "held"]


@dataclass(frozen=True, slots=True)
class KVLeaseShape:
    """The memory of one rank."""

    pool_bytes: int
    slab_bytes: int
    journal_bytes: int = 0  # of the host's memory, beside the pool; 0: there is none
    device: str = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVAskEvent:
    """A rank of an engine asks for its KV memory."""

    session: int
    process: int | None  # identifies the pidfd that fires when the asker has ended; None: there is none
    epoch: int
    claimed: int  # the highest epoch that its engine has claimed; 0: none
    shape: KVLeaseShape
    deadline: float = inf  # until when it waits for the predecessor's end


@dataclass(frozen=True, slots=True, kw_only=True)
class KVMadeEvent:
    """The memory for the asker was taken, or the device has too little."""

    is_made: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGoneEvent:
    """A session's connection has ended; its process may still run."""

    session: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVReleaseEvent:
    """The holder gives its memory back, and does not write to it any more."""

    session: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPreparedEvent:
    """The holder has prepared its memory, which was fresh."""

    session: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVWithdrawEvent:
    """A rank has no memory of the service, and wants none any more: it has, or takes, memory of its own.

    It may have given up waiting for an answer that is on its way. Its process has nothing mapped.
    """

    session: int
    process: int | None
    epoch: int  # the highest that its engine has claimed; 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEndedEvent:
    """The pidfd of a process has fired."""

    process: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEpochEvent:
    """An engine of the cohort has claimed an epoch: lower ones get nothing any more."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVAbandonedEvent:
    """The cohort has no engine any more, so nobody will ask for what is here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTickEvent:
    """Time has passed."""


KVLeaseEvent = (
    KVAskEvent
    | KVMadeEvent
    | KVGoneEvent
    | KVReleaseEvent
    | KVPreparedEvent
    | KVWithdrawEvent
    | KVEndedEvent
    | KVEpochEvent
    | KVAbandonedEvent
    | KVTickEvent
)


@dataclass(frozen=True, slots=True)
class MakeKV:
    """Take memory for a set; KVMadeEvent follows."""

    number: int
    shape: KVLeaseShape


@dataclass(frozen=True, slots=True)
class GrantKV:
    """The asker may write to a set."""

    session: int
    number: int
    is_fresh: bool


@dataclass(frozen=True, slots=True)
class RefuseKV:
    """The asker gets nothing."""

    session: int
    code: KVRefusalCode


@dataclass(frozen=True, slots=True)
class FreeKV:
    """Give the descriptors of a set up; a process that still has it mapped keeps it."""

    number: int


@dataclass(frozen=True, slots=True)
class KillWriter:
    """Kill a process, if the system allows it; KVEndedEvent follows when it has ended."""

    process: int


@dataclass(frozen=True, slots=True)
class KVReleased:
    """A session holds no memory any more."""

    session: int


KVEffect = MakeKV | GrantKV | RefuseKV | FreeKV | KillWriter | KVReleased


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSet:
    """Memory for the KV of one rank."""

    number: int
    shape: KVLeaseShape
    writer: int | None = None  # the process that may write to it
    session: int = 0  # to which it was granted last, as long as somebody may write to it
    is_quiet: bool = True  # nobody can write to it
    is_fresh: bool = True  # no holder has said that it has prepared it


@dataclass(frozen=True, slots=True, kw_only=True)
class KVState:
    """The memory of one rank of a cohort."""

    phase: KVPhase = KVPhase.EMPTY
    epoch: int = 0  # the highest that was seen
    current: KVSet | None = None  # in MAKING the set that is being made; None only in EMPTY
    old: KVSet | None = None  # in MAKING: what the new set replaces, once it is there
    holder: int | None = None  # session, in LEASED
    granted: int = 0  # the epoch of the last grant
    ask: KVAskEvent | None = None  # who waits, in MAKING and QUARANTINED
    serial: int = 0
