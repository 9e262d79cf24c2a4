"""Applies the table of a lease's states and events: what is sent and freed in each transition.

:data:`LEASE` is the table of all states and events; :class:`LeaseMachine` applies it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

from segue.disagg.lease import (
    LOST_S,
    RECONNECT_S,
    SILENT_S,
    STUCK_S,
    WEIGHTS_S,
    Lease,
    LeaseEvent,
    LeasePort,
    LeaseState,
)
from segue.disagg.offer import REMEMBERED_S
from segue.disagg.peers import Peers
from segue.disagg.recent import RecentHandovers, note
from segue.disagg.transports.choice import TRAITS
from segue.messages.kv import Claim, Grant, PreparePages, Revoke
from segue.messages.requests import pack_ids

# The request of such a lease has ended or goes on without it, and its pages cannot be freed yet.
LEAVING = (LeaseState.REVOKED, LeaseState.QUARANTINED, LeaseState.DROPPED)


class LeaseMachine:
    """All leases of a worker, and what happens to them; `Leases` says when."""

    def __init__(self, target: LeasePort, peers: Peers, *, num_ranks: int) -> None:
        """``num_ranks`` is this worker's number of tensor-parallel ranks."""
        self._num_ranks = num_ranks
        self._num_tickets = 0
        self.by_ticket: dict[int, Lease] = {}  # those whose pages the own ranks make ready
        self._target = target
        self._peers = peers
        self.active: dict[int, Lease] = {}  # by handoff: those whose request awaits its KV
        self.leaving: dict[
            tuple[str, int, int], Lease
        ] = {}  # by (peer, handoff, number): those in a state of LEAVING
        self.ended: dict[int, float] = {}  # handoff -> until when it is remembered, oldest first
        self.reconnect_at = inf
        self.recent = RecentHandovers("decode")

    def __iter__(self) -> Iterator[Lease]:
        yield from self.active.values()
        yield from self.leaving.values()

    def claim(self, lease: Lease, now: float) -> None:
        """Claim the KV of a request; connects to the prefill worker first, if need be."""
        assert lease.handoff not in self.active
        self.active[lease.handoff] = lease
        note(lease.events, "claim", now)
        if (peer := self._peers.at(lease.address)) is not None:
            self.send_claim(lease, peer.hello.incarnation, now)
        else:
            self._peers.connect(lease.address)

    def send_claim(self, lease: Lease, incarnation: str, now: float) -> None:
        peer = self._peers.open[incarnation]
        lease.peer, lease.session, lease.transport = incarnation, peer.session, peer.transport
        lease.pieces = peer.pieces
        if peer.is_suspect:
            lease.gone_reason = "suspect"
            self.apply(lease, LeaseEvent.GONE, now)
            return
        claim = Claim(
            handoff=lease.handoff,
            rid=lease.rid,
            num_tokens=lease.num_tokens,
            prompt_hash=lease.prompt_hash,
            priority=-lease.order[0],
        )
        self._peers.send(incarnation, claim)

    def apply(self, lease: Lease, event: LeaseEvent, now: float) -> None:
        """Apply one event: enter the table's next state, and do what the table says."""
        note(lease.events, event.name.lower(), now)
        before = lease.state
        lease.state, actions = LEASE[before][event]
        if lease.state is not before:
            lease.deadline = inf
            self._move(lease, now)
        for action in actions:
            action(self, lease, now)

    def _move(self, lease: Lease, now: float) -> None:
        """Put a lease where leases of its state are kept; call it for every change of the state."""
        if lease.state in (*LEAVING, LeaseState.ENDED):
            if self.active.get(lease.handoff) is lease:
                del self.active[lease.handoff]
                self.ended.pop(lease.handoff, None)
                self.ended[lease.handoff] = now + REMEMBERED_S
            key = (lease.peer or "", lease.handoff, lease.number)
            if lease.state is LeaseState.ENDED:
                self.leaving.pop(key, None)
                self.recent.add(lease)
            else:
                lease.left_at = min(lease.left_at, now)
                self.leaving[key] = lease

    def _await_progress(self, lease: Lease, now: float) -> None:
        lease.deadline = now + SILENT_S

    def _send_grant(self, lease: Lease, now: float) -> None:
        assert lease.peer is not None and lease.hold is not None
        message = Grant(
            handoff=lease.handoff,
            lease=lease.number,
            first_page=lease.hold.num_shared,
            pages=pack_ids(lease.hold.own_pages),
        )
        self._peers.send(lease.peer, message)

    def _forget_number(self, lease: Lease, now: float) -> None:
        """Go back to a claim that has no lease yet."""
        lease.number = 0

    def _free(self, lease: Lease, now: float) -> None:
        """Free the pages: the prefill worker no longer writes to them."""
        if lease.hold is not None:
            self._target.release(lease.hold)
            lease.hold = None

    def _give_up(self, lease: Lease, now: float) -> None:
        self._target.give_up(lease.rid, lease.gone_reason, lease.message)

    def _revoke_final(self, lease: Lease, now: float) -> None:
        """Tell the prefill worker that its KV is not needed any more."""
        self._revoke(lease, final=True)

    def _revoke(self, lease: Lease, *, final: bool) -> None:
        if lease.peer is not None:
            message = Revoke(
                handoff=lease.handoff, lease=lease.number, reason=lease.revoke_reason, final=final
            )
            self._peers.send(lease.peer, message)

    def _revoke_again(self, lease: Lease, now: float) -> None:
        """Ask for the last word; another decode worker may still claim the handoff."""
        self._revoke(lease, final=False)

    def _await_last_word(self, lease: Lease, now: float) -> None:
        lease.revoked_at, lease.deadline = now, now + SILENT_S

    def _claim_again(self, lease: Lease, now: float) -> None:
        """Revoke a lease whose pages are wanted back.

        With the first token the request goes on alone; without it, the request claims again.
        """
        if lease.first is not None:
            self._revoke(lease, final=True)
            self._give_up(lease, now)
            return
        self._revoke(lease, final=False)
        self.claim(
            Lease(
                handoff=lease.handoff,
                rid=lease.rid,
                address=lease.address,
                num_tokens=lease.num_tokens,
                prompt_hash=lease.prompt_hash,
                order=lease.order,
                logprobs=lease.logprobs,
                num_parts=lease.num_parts,
            ),
            now,
        )

    def _suspect(self, lease: Lease, now: float) -> None:
        """The last word is late: the pair gets no new lease; later its connection is closed."""
        assert lease.peer is not None
        if now >= lease.revoked_at + STUCK_S:
            text = f"neither Sent nor Gone has come for lease {lease.number} within {STUCK_S:.0f} s"
            self._peers.close(lease.peer, text)
            return
        lease.deadline = lease.revoked_at + STUCK_S
        if (peer := self._peers.open.get(lease.peer)) is not None:
            peer.is_suspect = True

    def _trust(self, lease: Lease, now: float) -> None:
        """The last word has come: the peer is not suspect any more, unless it owes another one."""
        if lease.peer is not None and (peer := self._peers.open.get(lease.peer)) is not None:
            late = (each.revoked_at + SILENT_S for each in self.leaving.values() if each.peer == lease.peer)
            peer.is_suspect = any(now >= deadline for deadline in late)

    def _prepare(self, lease: Lease, now: float) -> None:
        """Have the own ranks make the pages ready; none is freed before all ranks have answered."""
        assert lease.peer is not None and lease.hold is not None and lease.sent is not None
        self._num_tickets += 1
        lease.num_unprepared = self._num_ranks
        self.by_ticket[self._num_tickets] = lease
        command = PreparePages(
            ticket=self._num_tickets,
            pages=lease.hold.own_pages,
            pieces=lease.pieces,
            sums=lease.sent.sums,
        )
        self._peers.commands.append(command)

    def _await_weights(self, lease: Lease, now: float) -> None:
        """Wait for this worker's own commit, once for each lease."""
        if lease.weights_until is None:
            lease.weights_until = now + WEIGHTS_S
        lease.deadline, lease.gone_reason = lease.weights_until, "version"

    def _reconnect(self, lease: Lease, now: float) -> None:
        """Try to reach the prefill worker again: its last word may come over the next connection."""
        self.reconnect_at = min(self.reconnect_at, now + RECONNECT_S)

    def _await_silence(self, lease: Lease, now: float) -> None:
        """Where nothing proves that the writer has gone, give it time to notice the lost connection."""
        if not TRAITS[lease.transport].proves_gone:
            lease.deadline = now + LOST_S


Action = Callable[[LeaseMachine, Lease, float], None]
_S, _E, _M = LeaseState, LeaseEvent, LeaseMachine

# State -> event -> (next state, actions). An event that is missing cannot happen in that state.
LEASE: dict[LeaseState, dict[LeaseEvent, tuple[LeaseState, tuple[Action, ...]]]] = {
    _S.CLAIMED: {
        _E.RESERVE: (_S.QUEUED, ()),
        _E.GONE: (_S.ENDED, (_M._give_up,)),
        _E.UNWANTED: (_S.ENDED, (_M._revoke_final,)),
        _E.WANTED_BACK: (_S.CLAIMED, ()),
        _E.LINK_LOST: (_S.ENDED, (_M._give_up,)),
    },
    _S.QUEUED: {
        _E.ROOM: (_S.GRANTED, (_M._send_grant, _M._await_progress)),
        _E.GONE: (_S.ENDED, (_M._give_up,)),
        _E.GONE_AGAIN: (_S.CLAIMED, (_M._forget_number,)),
        _E.UNWANTED: (_S.ENDED, (_M._revoke_final,)),
        _E.WANTED_BACK: (_S.QUEUED, ()),
        _E.LINK_LOST: (_S.ENDED, (_M._give_up,)),
    },
    _S.GRANTED: {
        _E.SENT: (_S.LANDED, ()),
        _E.SENT_RAW: (_S.PREPARING, (_M._prepare,)),
        _E.GONE: (_S.ENDED, (_M._free, _M._give_up)),
        _E.GONE_AGAIN: (_S.CLAIMED, (_M._free, _M._forget_number)),
        _E.UNWANTED: (_S.REVOKED, (_M._revoke_final, _M._await_last_word)),
        _E.WANTED_BACK: (_S.REVOKED, (_M._await_last_word, _M._claim_again)),
        _E.SILENT: (_S.REVOKED, (_M._revoke_final, _M._await_last_word, _M._give_up)),
        _E.LINK_LOST: (_S.QUARANTINED, (_M._reconnect, _M._await_silence, _M._give_up)),
    },
    _S.PREPARING: {
        _E.PREPARED: (_S.LANDED, ()),
        _E.UNUSABLE: (_S.ENDED, (_M._free, _M._give_up)),
        _E.UNWANTED: (_S.DROPPED, ()),
        _E.WANTED_BACK: (_S.DROPPED, (_M._give_up,)),
        _E.LINK_LOST: (_S.PREPARING, ()),
    },
    _S.DROPPED: {
        _E.PREPARED: (_S.ENDED, (_M._free,)),
        _E.UNUSABLE: (_S.ENDED, (_M._free,)),
        _E.LINK_LOST: (_S.DROPPED, ()),
        _E.LINK_BACK: (_S.DROPPED, ()),
        _E.WRITERS_GONE: (_S.DROPPED, ()),
    },
    _S.LANDED: {
        _E.ADOPTED: (_S.ENDED, ()),
        _E.UNWANTED: (_S.ENDED, (_M._free,)),
        _E.WANTED_BACK: (_S.ENDED, (_M._free, _M._give_up)),
        _E.LINK_LOST: (_S.LANDED, ()),
        _E.NEWER: (_S.AHEAD, (_M._await_weights,)),
        _E.COMMITTED: (_S.LANDED, ()),
    },
    _S.AHEAD: {
        _E.UNWANTED: (_S.ENDED, (_M._free,)),
        _E.WANTED_BACK: (_S.ENDED, (_M._free, _M._give_up)),
        _E.SILENT: (_S.ENDED, (_M._free, _M._give_up)),
        _E.LINK_LOST: (_S.AHEAD, ()),
        _E.COMMITTED: (_S.LANDED, ()),
    },
    _S.REVOKED: {
        _E.SENT: (_S.ENDED, (_M._free, _M._trust)),
        _E.GONE: (_S.ENDED, (_M._free, _M._trust)),
        _E.GONE_AGAIN: (_S.ENDED, (_M._free, _M._trust)),
        _E.SILENT: (_S.REVOKED, (_M._suspect,)),
        _E.LINK_LOST: (_S.QUARANTINED, (_M._reconnect, _M._await_silence)),
        _E.WRITERS_GONE: (_S.ENDED, (_M._free, _M._trust)),
    },
    _S.QUARANTINED: {
        _E.LINK_BACK: (_S.REVOKED, (_M._revoke_again, _M._await_last_word)),
        _E.WRITERS_GONE: (_S.ENDED, (_M._free,)),
        _E.SILENT: (_S.ENDED, (_M._free,)),
    },
}
