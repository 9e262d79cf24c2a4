"""Offers: the KV of prompts that a prefill worker hands over.

    OPEN -> CLAIMED -> SENDING -> ENDED          SENDING -> DRAINING -> OPEN or ENDED

An offer begins with its request and outlives it: once the request has ended with its first token, the offer
owns the pages. A decode worker claims it, gets a *lease* (one attempt to send the pages) and grants pages of
its own. From then on pages are pushed as they are computed. The prefill worker ends every lease by its *last
word*, which is either ``Sent`` or ``Gone``: from then on nothing is written under this lease. So a lease that
ends early while pushes run has to drain first, and the pages that these pushes read stay the offer's until
then.

The table of all states and events is `OFFER` in `segue.disagg.offer_machine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from typing import Protocol

from segue.disagg.recent import TimedEvent
from segue.kvcache.prefix_cache import Node
from segue.messages.kv import First, GoneReason, KVIdentity
from segue.messages.requests import TokenLogprob

UNCLAIMED_S = 10.0  # how long pages wait for a claim after the first token
GRANT_S = 30.0  # how long a decode worker may take to grant pages
PUSH_S = 10.0  # how long no push may end before the lease is given up
STUCK_S = 60.0  # how long a lease may drain before the connection is closed
EARLY_CLAIM_S = 10.0  # how long a claim waits for its request
MAX_EARLY_CLAIMS = 4096
ALIVE_S = 2.0  # seconds between two reports of a lease's progress
REMEMBERED_S = 60.0  # how long an ended handoff is remembered, by either side
LOGPROBS_PER_PART = 256  # each with 255 top ones, the limit of --max-logprobs, they have 0.94 MiB


class OfferState(Enum):
    """The state of an offer."""

    OPEN = auto()  # no decode worker has a lease
    CLAIMED = auto()  # a lease has begun: pages were asked for
    SENDING = auto()  # pages are granted, and pushes write to them
    DRAINING = auto()  # the lease is given up; pushes still run
    ENDED = auto()


class OfferEvent(Enum):
    """What can happen to an offer."""

    READY = auto()  # a decode worker has claimed it, and the first chunk is launched
    GRANT = auto()
    REVOKE = auto()  # the decode worker gives the lease up
    REVOKE_FINAL = auto()  # it has no use for the KV at all, and no other decode worker has claimed it
    LAUNCHED = auto()  # a chunk of the prompt is launched
    FIRST = auto()  # the first token is known, and the request goes on elsewhere
    FINISHED = auto()  # the first token is known, and ends the request
    COMPLETE = auto()  # all pages are written and the first token is known
    FAILED = auto()  # a push failed
    ABORTED = auto()  # the request ended without a first token
    RETRACTED = auto()  # the request gave up its KV, and will compute it again
    WITHDRAWN = auto()  # the scheduler wants the pages of an ended request back
    EXPIRED = auto()  # the state's deadline has passed
    LINK_LOST = auto()  # the connection to the decode worker with the lease
    DRAINED = auto()  # no push runs any more, and the offer can be claimed again
    DRAINED_LAST = auto()  # no push runs any more, and the offer ends


@dataclass(frozen=True, slots=True)
class HeldPages:
    """Pages in token order and a lock in the prefix cache, which an offer or a lease owns."""

    pages: list[int]
    num_shared: int  # leading pages that belong to the prefix cache
    node: Node

    @property
    def own_pages(self) -> list[int]:
        """The pages that do not belong to the prefix cache."""
        return self.pages[self.num_shared :]


@dataclass(slots=True, kw_only=True, eq=False)
class Offer:
    """The KV of one request's prompt."""

    handoff: int
    rid: str
    num_tokens: int  # tokens whose KV is handed over: the prompt, and outputs that the request began with
    prompt_hash: bytes
    state: OfferState = OfferState.OPEN
    deadline: float = inf  # of the state, in seconds of the scheduler's clock
    claimant: str | None = None  # incarnation of the decode worker whose claim stands
    next_claimant: str | None = None  # incarnation of one whose claim waits until that claim has ended
    lease: int = 0  # number of the present lease; 0: none
    session: str = ""  # the connection that the lease was granted over

    launched: int = 0  # tokens whose KV launched steps compute
    after_step: int = 0  # number of the last of these steps
    identities: list[KVIdentity] = field(default_factory=list)  # of the weights of these steps, in order

    first_page: int = 0  # index of the first page of the prompt that was granted a target
    targets: list[int] = field(default_factory=list)  # granted pages of the decode worker
    num_posted: int = 0  # granted pages that pushes were posted for
    pushes: dict[int, int] = field(default_factory=dict)  # ticket -> ranks that still write
    # (target rank, first head, number of heads) -> ticket -> checksums of the pages of this push
    sums: dict[tuple[int, int, int], dict[int, bytes]] = field(default_factory=dict)

    first: First | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of prompt tokens
    first_sent: bool = False  # whether the claimant has the first token
    is_told: bool = False  # whether any decode worker has got it
    is_alive: bool = True  # whether the request has not ended
    source: HeldPages | None = None  # the pages, once the request has ended; while it runs, they are its own
    draining: list[HeldPages] = field(default_factory=list)  # pages that only pushes still read
    again: bool = False  # DRAINING: the claim stands, because the request computes the KV again
    final: bool = False  # DRAINING: the offer ends when it has drained
    reason: GoneReason = "withdrawn"  # DRAINING: why the lease ends
    draining_since: float = 0.0
    events: list[TimedEvent] = field(default_factory=list)  # for people

    @property
    def lease_ends(self) -> bool:
        """Whether the claim ends with its lease, which only waits for pushes."""
        return self.state is OfferState.DRAINING and not self.again

    def next_draining(self) -> OfferEvent:
        """Returns the event with which draining ends."""
        is_wanted = not self.final or self.next_claimant is not None
        of_use = is_wanted and (self.is_alive or self.source is not None)
        return OfferEvent.DRAINED if of_use else OfferEvent.DRAINED_LAST


class OfferPort(Protocol):
    """The part of the scheduler that offers use."""

    def pages(self, rid: str) -> Sequence[int]:
        """Returns the pages of a running request, in token order."""

    def release(self, hold: HeldPages) -> None:
        """Give pages back to the prefix cache and the free list."""


@dataclass(frozen=True, slots=True)
class EndedOffer:
    """What is remembered of an offer that has ended."""

    until: float
    prompt_hash: bytes
    reason: GoneReason
    first: First | None
    logprobs: list[TokenLogprob]
    is_told: bool  # whether a decode worker has got the first token
    ended_at: float
