"""What the coordinator of a router and the processes that serve its clients tell each other.

Both ends belong to the same version of Segue, as the coordinator starts the others. Times are of the
monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

from typing import Any

import msgspec

from segue.laps.classes import PromptClass
from segue.messages.fleet import WorkerRecord, WorkerReport
from segue.router.breaker import Breaker, LegEnd
from segue.router.entry import RouterCounters
from segue.router.fleet import CacheName, Held

# --- to a serving process ---


class BeginServing(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message: what the process is to do."""

    config: dict[str, Any]  # the options of the router
    address: bytes  # of the Unix socket where the coordinator answers what it answers for all processes


class SharedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as the coordinator knows it; what it knows of requests is not part of it."""

    number: int  # of the registration: another one with the same URL has another number
    url: str
    problem: str  # as `WorkerEntry` has it, as are the next two
    is_leaving: bool
    last_cut: tuple[int, LegEnd, str]
    record: WorkerRecord | None  # None: it has not said who it is. What follows is of its view
    newest_epoch: int = 0
    connected: bool = True
    is_foreign: bool = False
    has_all_routes: bool = True
    is_drained: bool = False
    report: WorkerReport | None = None
    reported_at: float = 0.0  # seconds
    group: PromptClass | None = None


class FleetState(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """All workers at one moment. The process takes it, and answers with a :class:`ProcessReport`."""

    version: int  # each one is higher than the one before
    present: list[int]  # the numbers of all workers
    changed: list[SharedWorker]  # those that are not as in the state before; all in the first one
    served: dict[str, float]  # as `Registry` has it


class HeldElsewhere(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What all other processes have in flight, by worker."""

    held: dict[str, Held]


class EndServing(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Take no further requests, and end once those in flight have ended. It may be sent again."""

    drain_s: float  # seconds after which they are ended; 0: now


# --- from a serving process ---


class ProcessReport(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What a process has in flight, and its totals since it began."""

    version: int  # of the last state that it has taken; 0: it has none, and waits for the first one
    held: dict[str, Held] = {}  # by worker
    pending: dict[PromptClass, int] = {}  # requests whose prompts are in flight
    breakers: dict[str, Breaker] = {}  # by worker; those that are not closed
    counters: RouterCounters = msgspec.field(default_factory=RouterCounters)


# --- from a serving process to all others ---


class PrefixGiven(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A worker has, or will soon have, the KV of a prompt."""

    worker: str
    cache: CacheName | None
    keys: bytes  # of the prompt's blocks, as int64


class PrefixLacked(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A worker had less of a prompt than was predicted."""

    worker: str
    keys: bytes  # of the prompt's blocks, as int64
    predicted: int  # bytes
    cached: int  # bytes


PrefixNews = PrefixGiven | PrefixLacked
ToProcess = BeginServing | FleetState | HeldElsewhere | EndServing | PrefixNews
FromProcess = ProcessReport | PrefixNews
