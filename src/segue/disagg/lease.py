"""Leases: the pages that a decode worker lets a prefill worker write.

    CLAIMED -> QUEUED -> GRANTED -> LANDED -> ENDED          GRANTED -> REVOKED -> ENDED
                                    LANDED <-> AHEAD          GRANTED -> PREPARING -> LANDED
                                                              PREPARING -> DROPPED -> ENDED

A lease begins when a request that awaits its KV claims it. From GRANTED on, the prefill worker may write to
its pages at any time. So they are freed only after the prefill worker's last word (``Sent`` or ``Gone``), or
once nobody can write for the lost connection any more. In the same way, pages that the own ranks make ready
are freed only once all of these have answered. A lease may therefore outlive its request. Its pages become
the request's only when they have landed and the scheduler adopts the request.

The table of all states and events is `LEASE` in `segue.disagg.lease_machine`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from typing import Literal, Protocol

from segue.disagg.offer import HeldPages
from segue.disagg.recent import TimedEvent
from segue.messages.kv import First, GoneReason, HeadPiece, KVIdentity, RevokeReason, Sent
from segue.messages.requests import TokenLogprob

SILENT_S = 10.0  # how long a lease may make no progress before its pages are taken back
# After which pages without a last word are not waited for any more. Where nothing proves that their writer
# can write no more, they are used again then.
LOST_S = 30.0
STUCK_S = 60.0  # how long a revoked lease waits for the last word before the connection is closed
STEP_S = 60.0  # how long one step of the prefill worker may take; longer than that, its device hangs
WEIGHTS_S = 2.0  # how long KV of newer weights waits until they are served here too
RECONNECT_S = 1.0  # seconds between two attempts to reach a prefill worker that owes a last word


# Why a request does not get its KV. version: it is of other weights than those that are served here.
# checksum: its bytes are not those that the prefill worker had.
GiveUpReason = GoneReason | Literal["version", "checksum"]


class LeaseState(Enum):
    """The state of a lease."""

    CLAIMED = auto()  # it holds nothing
    QUEUED = auto()  # pages were asked for
    GRANTED = auto()  # the prefill worker may write to its pages
    # All pages are written, and the own ranks make them ready: they put pieces in order, compare checksums.
    PREPARING = auto()
    DROPPED = auto()  # the same, and nobody wants the pages any more
    LANDED = auto()  # all pages are written, and the first token is known
    AHEAD = auto()  # the same, with KV of weights that an update of this worker is about to commit
    REVOKED = auto()  # the pages are wanted back; the prefill worker has not said its last word
    QUARANTINED = auto()  # the connection is lost, and the prefill worker may still write
    ENDED = auto()


class LeaseEvent(Enum):
    """What can happen to a lease."""

    RESERVE = auto()
    ROOM = auto()  # there are pages and a request slot for it
    SENT = auto()
    SENT_RAW = auto()  # the same as SENT, but the own ranks have to make the pages ready
    PREPARED = auto()  # they have done so
    UNUSABLE = auto()  # they have ended, and a page differs from what was sent, or a rank has failed
    GONE = auto()
    GONE_AGAIN = auto()  # the prefill worker computes the KV again, and the claim stands
    UNWANTED = auto()  # the request has ended, or computes the prompt itself
    WANTED_BACK = auto()  # the pages are wanted back, and the request still wants its KV
    SILENT = auto()  # nothing came for too long
    LINK_LOST = auto()
    LINK_BACK = auto()  # another connection to the same prefill worker is open
    WRITERS_GONE = auto()  # nobody can write for the lost connection any more
    ADOPTED = auto()  # the request has taken the pages
    NEWER = auto()  # the KV is of weights that are not served here yet
    COMMITTED = auto()  # other weights are served here


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """One attempt to get one request's KV."""

    handoff: int
    rid: str
    address: str  # of the prefill worker
    num_tokens: int
    prompt_hash: bytes
    order: tuple[int, int]  # (-priority, arrival): who gets pages first
    state: LeaseState = LeaseState.CLAIMED
    peer: str | None = None  # incarnation of the prefill worker; None: no connection to it is open yet
    session: str = ""  # the connection that it was claimed over
    transport: str = ""  # the kind by which its pages come
    pieces: list[HeadPiece] = field(default_factory=list)  # as which heads of its pages come
    number: int = 0  # that the prefill worker gave it; 0: none yet
    deadline: float = inf
    revoked_at: float = inf
    left_at: float = inf  # when its request gave it up, and its pages stayed
    hold: HeldPages | None = None  # its pages, with those of this worker's prefix cache that it begins with
    # what the prefill worker has said
    first: First | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of prompt tokens, in parts
    num_parts: int = 0
    sent: Sent | None = None
    num_unprepared: int = 0  # PREPARING, DROPPED: own ranks that have not answered
    is_unusable: bool = False  # one of them cannot make the pages ready, or has found a difference
    # (old, new) of each commit of weights on this worker since the pages were granted
    commits: list[tuple[KVIdentity, KVIdentity]] = field(default_factory=list)
    revoke_reason: RevokeReason = "ended"  # why it is revoked, if it is
    weights_until: float | None = None  # how long KV of newer weights may wait; None: it has not had to
    gone_reason: GiveUpReason = "link"  # why its KV does not come, if it does not
    message: str = ""  # the same as a sentence; empty: the reason says it all
    events: list[TimedEvent] = field(default_factory=list)  # for people

    @property
    def is_kept_for_a_while(self) -> bool:
        """Whether its request has left it, and its pages come home after a while whatever the writer does."""
        is_known = self.state is LeaseState.QUARANTINED and self.deadline < inf
        return is_known or self.state is LeaseState.DROPPED


class LeasePort(Protocol):
    """The part of the scheduler that leases use."""

    @property
    def vocab_size(self) -> int:
        """The number of token ids that this worker knows."""

    def may_start(self, rid: str) -> bool:
        """Whether a request may have pages now; during a pause of mode ``wait`` a newcomer may not."""

    def take(self, rid: str) -> HeldPages | None:
        """Take pages for a request's prompt, and keep a request slot for it; None: there are too few."""

    def release(self, hold: HeldPages) -> None:
        """Give pages back to the prefix cache and the free list."""

    def take_first(self, rid: str, first: First, logprobs: list[TokenLogprob]) -> None:
        """Give a request its first token, which may end it."""

    def give_up(self, rid: str, reason: GiveUpReason, message: str) -> None:
        """The KV of a request will not come: it computes the prompt itself, or fails."""
