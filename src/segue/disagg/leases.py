"""The leases of a worker: what requests, prefill workers, the scheduler and the clock do to them.

:class:`Leases` checks each message and turns it into an event; `segue.disagg.lease_machine` applies it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from math import inf

from segue.disagg.lease import RECONNECT_S, SILENT_S, STEP_S, Lease, LeaseEvent, LeasePort, LeaseState
from segue.disagg.lease_machine import LeaseMachine
from segue.disagg.offer import HeldPages
from segue.disagg.peers import Peers, ProtocolViolation
from segue.disagg.recent import RecentHandovers, note
from segue.messages.kv import (
    First,
    Gone,
    KVIdentity,
    PagesPrepared,
    PromptLogprobs,
    Pushed,
    ReservePages,
    RevokeReason,
    Sent,
)
from segue.messages.requests import TokenLogprob

# All pages are written: the prefill worker has said its last word.
WRITTEN = (LeaseState.PREPARING, LeaseState.DROPPED, LeaseState.LANDED, LeaseState.AHEAD)


class Leases:
    """All leases of a worker. Every method that takes ``now`` may send messages through ``peers``."""

    def __init__(self, target: LeasePort, peers: Peers, *, num_ranks: int) -> None:
        """``num_ranks`` is this worker's number of tensor-parallel ranks."""
        self._machine = LeaseMachine(target, peers, num_ranks=num_ranks)
        self._target = target
        self._peers = peers
        self.active = self._machine.active
        self.leaving = self._machine.leaving

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._machine)

    def holds(self) -> Iterator[tuple[Lease, HeldPages]]:
        """Yields all pages and locks that leases own."""
        yield from ((lease, lease.hold) for lease in self if lease.hold is not None)

    @property
    def num_places(self) -> int:
        """The number of request slots that active leases keep."""
        return sum(lease.hold is not None for lease in self.active.values())

    @property
    def landed(self) -> list[Lease]:
        """The leases whose requests can be adopted."""
        return [lease for lease in self.active.values() if lease.state is LeaseState.LANDED]

    @property
    def recent(self) -> RecentHandovers:
        """The leases that ended last."""
        return self._machine.recent

    # --- what the request does ---

    def is_known(self, handoff: int) -> bool:
        """Whether a request awaits the KV of this handoff, or one did lately.

        Messages about its lease may still come, and they do not say which prompt they are about.
        """
        return handoff in self.active or handoff in self._machine.ended

    def claim(self, lease: Lease, now: float) -> None:
        """Claim the KV of a request; connects to the prefill worker first, if need be."""
        self._machine.claim(lease, now)

    def cancel(self, handoff: int, now: float, why: RevokeReason = "ended") -> None:
        """End the lease of a request that has ended, or that computes its prompt itself."""
        if (lease := self.active.get(handoff)) is not None:
            lease.revoke_reason = why
            self._machine.apply(lease, LeaseEvent.UNWANTED, now)

    def take_back_all(self, why: RevokeReason, now: float) -> None:
        """Take back the pages of all leases; their requests claim again, or go on with what they have."""
        for lease in list(self.active.values()):
            lease.revoke_reason = why
            self._machine.apply(lease, LeaseEvent.WANTED_BACK, now)

    def committed(self, old: KVIdentity, new: KVIdentity, now: float) -> None:
        """Note that other weights are served: granted pages may get KV of the old or the new ones."""
        for lease in self.active.values():
            if lease.hold is not None:
                lease.commits.append((old, new))
            if lease.state in (LeaseState.LANDED, LeaseState.AHEAD):
                self._machine.apply(lease, LeaseEvent.COMMITTED, now)

    def await_weights(self, lease: Lease, now: float) -> bool:
        """Let KV that has landed wait for this worker's own commit; returns whether it still may."""
        if lease.weights_until is not None and now >= lease.weights_until:
            return False
        self._machine.apply(lease, LeaseEvent.NEWER, now)
        return True

    def grant_all(self, now: float) -> None:
        """Grant pages to the leases that wait for them, in order, as long as there are enough."""
        queued = (lease for lease in self.active.values() if lease.state is LeaseState.QUEUED)
        granted = [lease for lease in queued if self._target.may_start(lease.rid)]
        for lease in sorted(granted, key=lambda lease: lease.order):
            hold = self._target.take(lease.rid)
            if hold is None:
                break
            lease.hold, lease.commits = hold, []
            self._machine.apply(lease, LeaseEvent.ROOM, now)

    def adopted(self, handoff: int, now: float) -> Lease:
        """Note that the request takes over the pages of its lease; returns the lease."""
        lease = self.active[handoff]
        self._machine.apply(lease, LeaseEvent.ADOPTED, now)
        return lease

    # --- what prefill workers and ranks do ---

    def link_opened(self, address: str | None, incarnation: str, now: float) -> None:
        """A connection is open: send the claims that wait for it, and ask for missing last words."""
        for lease in list(self.leaving.values()):
            if lease.peer == incarnation:
                self._machine.apply(lease, LeaseEvent.LINK_BACK, now)
        for lease in list(self.active.values()):
            if lease.peer is None and lease.address == address:
                self._machine.send_claim(lease, incarnation, now)

    def link_lost(self, incarnation: str, now: float) -> None:
        """The connection to a prefill worker is lost."""
        for lease in list(self):
            if lease.peer == incarnation:
                self._machine.apply(lease, LeaseEvent.LINK_LOST, now)

    def unreachable(self, address: str, now: float) -> None:
        """No connection to an address could be opened."""
        for lease in list(self.active.values()):
            if lease.peer is None and lease.address == address:
                self._machine.apply(lease, LeaseEvent.LINK_LOST, now)

    def writers_gone(self, session: str, now: float) -> None:
        """Nobody can write for a connection that is lost any more."""
        for lease in list(self.leaving.values()):
            if lease.session == session:
                self._machine.apply(lease, LeaseEvent.WRITERS_GONE, now)

    def on_reserve(self, incarnation: str, message: ReservePages, now: float) -> None:
        """The prefill worker has begun to compute the prompt."""
        lease = self._of(incarnation, message.handoff)
        if lease is None:
            return
        if message.num_tokens != lease.num_tokens:
            raise ProtocolViolation(
                f"ReservePages for {message.num_tokens} tokens of handoff {message.handoff}, which has "
                f"{lease.num_tokens}"
            )
        self._check(lease, LeaseState.CLAIMED, message)
        if message.lease <= 0 or (incarnation, message.handoff, message.lease) in self.leaving:
            raise ProtocolViolation(
                f"ReservePages for handoff {message.handoff} begins lease {message.lease}, which is not new"
            )
        lease.number = message.lease
        self._machine.apply(lease, LeaseEvent.RESERVE, now)

    def on_progress(self, incarnation: str, message: Pushed, now: float) -> None:
        """Note that the prefill worker still writes: the lease is not silent."""
        lease = self._of(incarnation, message.handoff)
        if lease is not None and lease.state is LeaseState.GRANTED and lease.number == message.lease:
            lease.deadline = now + SILENT_S

    def on_load(self, incarnation: str, step: int, is_busy: bool, now: float) -> None:
        """Note what the prefill worker says of its steps.

        In a long step it sends no `Pushed`, but the thread of its connection answers pings. So its leases are
        not silent while it computes, unless it has been at the same step for too long.
        """
        peer = self._peers.open[incarnation]
        if step != peer.step:
            peer.step, peer.step_since = step, now
        if not is_busy or now >= peer.step_since + STEP_S:
            return
        for lease in self:
            is_due = lease.state is LeaseState.GRANTED or (
                lease.state is LeaseState.REVOKED and not peer.is_suspect
            )
            if lease.peer == incarnation and is_due:
                lease.deadline = now + SILENT_S

    def on_logprobs(self, incarnation: str, message: PromptLogprobs, now: float) -> None:
        """Take a part of the logprobs of prompt tokens; after another claim all parts come again."""
        lease = self._of(incarnation, message.handoff)
        if lease is None or lease.first is not None:
            return
        self._check_tokens(message, message.entries)
        if message.part == 0:
            lease.logprobs, lease.num_parts = [], 0
        if message.part != lease.num_parts:
            raise ProtocolViolation(
                f"PromptLogprobs for handoff {message.handoff} has part {message.part}, but part "
                f"{lease.num_parts} comes next"
            )
        lease.logprobs += message.entries
        lease.num_parts += 1

    def on_first(self, incarnation: str, message: First, now: float) -> None:
        """Take the first token."""
        lease = self._of(incarnation, message.handoff)
        if lease is None or lease.first is not None:
            return
        if message.parts != lease.num_parts:
            raise ProtocolViolation(
                f"First for handoff {message.handoff} comes after {lease.num_parts} parts of logprobs, not "
                f"{message.parts}"
            )
        self._check_tokens(message, [TokenLogprob(message.token, 0.0), *filter(None, [message.logprob])])
        lease.first = message
        note(lease.events, "first", now)
        if lease.state is LeaseState.GRANTED:
            lease.deadline = now + SILENT_S
        self._target.take_first(lease.rid, message, lease.logprobs)

    def on_sent(self, incarnation: str, message: Sent, now: float) -> None:
        """Note that all pages are written."""
        lease = self._named(incarnation, message.handoff, message.lease)
        if lease is None:
            return
        if lease.state is not LeaseState.REVOKED:
            self._check(lease, LeaseState.GRANTED, message)
            if lease.first is None:
                raise ProtocolViolation(f"Sent for handoff {message.handoff} before its First")
        lease.sent = message
        is_raw = lease.state is LeaseState.GRANTED and bool(message.sums or lease.pieces)
        self._machine.apply(lease, LeaseEvent.SENT_RAW if is_raw else LeaseEvent.SENT, now)

    def prepared(self, event: PagesPrepared, now: float) -> None:
        """An own rank has made its part of a lease's pages ready, or cannot."""
        lease = self._machine.by_ticket[event.ticket]
        lease.num_unprepared -= 1
        if event.error:
            lease.is_unusable, lease.gone_reason, lease.message = True, event.reason, event.error
        if not lease.num_unprepared:
            del self._machine.by_ticket[event.ticket]
            end = LeaseEvent.UNUSABLE if lease.is_unusable else LeaseEvent.PREPARED
            self._machine.apply(lease, end, now)

    def on_gone(self, incarnation: str, message: Gone, now: float) -> None:
        """The KV will not come, or not under this lease."""
        lease = self._named(incarnation, message.handoff, message.lease)
        if lease is not None and lease.state not in WRITTEN:
            lease.gone_reason, lease.message = message.reason, message.message
            again = message.again and lease.number > 0  # a claim that got no lease is refused for good
            self._machine.apply(lease, LeaseEvent.GONE_AGAIN if again else LeaseEvent.GONE, now)

    def _of(self, incarnation: str, handoff: int) -> Lease | None:
        """Returns the active lease of a handoff, if this peer may speak about it."""
        lease = self.active.get(handoff)
        return lease if lease is not None and lease.peer == incarnation else None

    def _named(self, incarnation: str, handoff: int, number: int) -> Lease | None:
        """Returns the lease with this number; the number 0 is that of a claim without a lease."""
        leaving = self.leaving.get((incarnation, handoff, number))
        if leaving is not None:
            return leaving
        lease = self._of(incarnation, handoff)
        return lease if lease is not None and lease.number == number else None

    def _check(self, lease: Lease, state: LeaseState, message: ReservePages | Sent) -> None:
        if lease.state is not state:
            name = type(message).__name__
            raise ProtocolViolation(f"{name} for handoff {lease.handoff} in the state {lease.state.name}")

    def _check_tokens(self, message: First | PromptLogprobs, entries: Sequence[TokenLogprob]) -> None:
        """Raise ProtocolViolation if an entry has a token that no model here could compute or show."""
        size = self._target.vocab_size
        tokens = chain.from_iterable((each.token, *(token for token, _ in each.top)) for each in entries)
        if (wrong := next((token for token in tokens if not 0 <= token < size), None)) is not None:
            name = type(message).__name__
            raise ProtocolViolation(
                f"{name} for handoff {message.handoff} has token {wrong}, and the vocabulary has {size}"
            )

    # --- time ---

    @property
    def next_deadline(self) -> float:
        """When `expire` must be called; infinite: never."""
        return min([self._machine.reconnect_at, *(lease.deadline for lease in self)], default=inf)

    def expire(self, now: float) -> None:
        """Apply all deadlines that have passed."""
        for lease in [lease for lease in self if now >= lease.deadline]:
            if lease.state is not LeaseState.AHEAD:
                lease.revoke_reason, lease.gone_reason = "silent", "expired"
            self._machine.apply(lease, LeaseEvent.SILENT, now)
        ended = self._machine.ended
        while ended and now >= ended[oldest := next(iter(ended))]:
            del ended[oldest]
        if now >= self._machine.reconnect_at:
            quarantined = (each for each in self.leaving.values() if each.state is LeaseState.QUARANTINED)
            addresses = sorted({lease.address for lease in quarantined})
            for address in addresses:
                self._peers.connect(address)
            self._machine.reconnect_at = now + RECONNECT_S if addresses else inf
