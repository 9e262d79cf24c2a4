"""Adoption: a request goes on with KV that another worker has computed, once it has landed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from segue.disagg.lease import Lease
from segue.disagg.offer import HeldPages
from segue.messages.kv import KVIdentity
from segue.messages.requests import pack_ids
from segue.messages.steps import NewSlot
from segue.scheduler.request import DECODE, Request, Step

if TYPE_CHECKING:
    from segue.scheduler.handover import Handover
    from segue.scheduler.scheduler import Scheduler


class Adoption:
    """Lets requests decode with the pages of their leases."""

    def __init__(self, handover: Handover, scheduler: Scheduler) -> None:
        """``handover`` has the leases."""
        self._handover = handover
        self._scheduler = scheduler
        self.unplanned: list[Request] = []  # adopted, but no plan has told the device yet
        self.num_adopted = 0  # requests
        self.num_pages = 0  # that they got from other workers
        self.seconds = 0.0  # from their first tokens to their adoption, in sum

    @property
    def has_landed(self) -> bool:
        """Whether a request can be adopted."""
        return bool(self._handover.machine.leases.landed)

    def adopt(self, now: float) -> None:
        """Let each request whose KV has landed decode; KV of other weights is computed again here."""
        handover, leases = self._handover, self._handover.machine.leases
        for lease in leases.landed:
            request = handover.awaiting[lease.rid]
            if not (handover.may_start(lease.rid) and self._scheduler.may_guide(request)):
                continue
            fits = _fits(lease, self._scheduler.kv_identity)
            if fits is None:
                if self._is_ahead(lease) and leases.await_weights(lease, now):
                    continue
                leases.cancel(lease.handoff, now, why="version")
                handover.compute(request, "version")
                continue
            leases.adopted(lease.handoff, now)
            assert lease.hold is not None
            self.num_pages += len(lease.hold.own_pages)
            self.seconds += now - request.first_at
            request.taken_over_at = now
            self.start_decode(request, lease.hold, kv_epoch=self._scheduler.kv_epoch if fits else -1)
            lease.hold = None
            self.num_adopted += 1

    def _is_ahead(self, lease: Lease) -> bool:
        """Whether KV is of newer weights, which an update of this worker may be about to commit.

        Versions have no order. But weights that were served here before cannot be newer.
        """
        s = self._scheduler
        assert lease.sent is not None
        computed = lease.sent.identities[-1]
        is_alone = set(lease.sent.identities) == {computed} and not lease.commits
        return s.weights.is_updating and is_alone and not s.weights.has_served(computed)

    def start_decode(self, request: Request, hold: HeldPages, *, kv_epoch: int) -> None:
        """Let a request decode with pages that hold the KV of all its tokens but the last."""
        s = self._scheduler
        s.leave(request, DECODE)
        request.has_begun = True
        s.running[request.rid] = request
        request.slot = s.resources.free_slots.pop()
        request.pages, request.num_inserted, request.node = hold.pages, hold.num_shared, hold.node
        request.capacity = len(hold.pages) * s.limits.page_size
        request.launched = len(request.tokens) - 1  # the first token has no KV yet
        request.outputs_launched = request.num_outputs
        request.kv_epoch = kv_epoch
        self.unplanned.append(request)

    def announce(self, step: Step) -> None:
        """Tell the device about adopted requests."""
        for request in self.unplanned:
            step.plan.new_slots.append(
                NewSlot(request.slot, pack_ids(request.tokens), request.prompt_len, request.params)
            )
            step.plan.pages.append((request.slot, 0, list(request.pages)))

    def share(self) -> None:
        """Insert the pages of requests that have just been announced into the prefix cache."""
        adopted, self.unplanned = self.unplanned, []
        for request in adopted:
            self._scheduler.insert_pages(request, request.launched)

    def forget(self, request: Request) -> None:
        """Note that a request leaves the batch: if no plan has told the device about it yet, none will."""
        if request in self.unplanned:
            self.unplanned.remove(request)


def _fits(lease: Lease, here: KVIdentity) -> bool | None:
    """Returns whether KV that has landed may be used and shared.

    True: it may go into the prefix cache too. False: only its own request may use it. None: nobody may.

    Its own request may use the KV of two versions if one was committed in place while the KV was computed or
    on its way: a request that runs during such a commit has the KV of both, too.
    """
    sent = lease.sent
    assert sent is not None
    identities = {here, *sent.identities, *(identity for commit in lease.commits for identity in commit)}
    if len(identities) == 1:
        return True
    in_place = len(sent.identities) > 1 or bool(lease.commits)
    return False if in_place and len(identities) == 2 else None
