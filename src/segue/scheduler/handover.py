"""Requests whose prefill and decoding are done by two workers: the scheduler's side of offers and leases.

On the prefill worker a request ends with its first token, and its offer keeps the pages. On the decode worker
a request begins in the phase AWAIT, which owns nothing; its lease owns pages that the prefill worker writes.
Once they have landed, the request is *adopted*: it takes the pages over and decodes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from segue import errors
from segue.disagg.lease import LOST_S, GiveUpReason, Lease, LeaseState
from segue.disagg.machine import TransferMachine
from segue.disagg.offer import LOGPROBS_PER_PART, HeldPages, Offer
from segue.messages.control import HandoverCounters, SchedulerOutput
from segue.messages.kv import First, KVIdentity
from segue.messages.requests import FinishReason, Handoff, TokenLogprob, pack_ids
from segue.scheduler.adoption import Adoption
from segue.scheduler.request import WAITING, Request, Step
from segue.sizes import ceil_div

if TYPE_CHECKING:
    from segue.scheduler.scheduler import Scheduler


class Handover:
    """The offers and leases of one scheduler; it is the `HandoverPort` of the machine that keeps them."""

    def __init__(self, scheduler: Scheduler, num_ranks: int = 1) -> None:
        """``num_ranks`` is the number of tensor-parallel ranks."""
        self._scheduler = scheduler
        self.machine = TransferMachine(self, page_size=scheduler.limits.page_size, num_ranks=num_ranks)
        self.awaiting: dict[str, Request] = {}  # in the order of arrival
        self.adoption = Adoption(self, scheduler)
        self.replies: list[SchedulerOutput] = []  # to be sent to the frontend
        self._totals = HandoverCounters()
        self._chunks: dict[int, list[tuple[int, int]]] = {}  # by step in flight: (handoff, tokens so far)

    # --- what the scheduler calls ---

    def check(self, handoff: Handoff) -> None:
        """Raise the reason why a request with this handoff cannot be taken, if there is one."""
        known = self.machine.offers if handoff.part == "prefill" else self.machine.leases
        if known.is_known(handoff.id):
            raise errors.InvalidRequestError(
                f"handoff {handoff.id} is in use, or was within the last minute; draw another id for every "
                "request"
            )

    def add(self, request: Request, handoff: Handoff, now: float) -> None:
        """Begin the offer of a prefill worker's request, or claim the KV of a decode worker's."""
        digest = hashlib.sha256(pack_ids(request.tokens)).digest()
        if request.cache_salt:  # a request of another salt must not get the KV
            digest = hashlib.sha256(digest + request.cache_salt.encode()).digest()
        if handoff.part == "prefill":
            self.machine.offers.add(handoff.id, request.rid, len(request.tokens), digest, now)
            return
        self.awaiting[request.rid] = request
        lease = Lease(
            handoff=handoff.id,
            rid=request.rid,
            address=handoff.peer,
            num_tokens=len(request.tokens),
            prompt_hash=digest,
            order=(-request.priority, request.arrival),
        )
        self.machine.leases.claim(lease, now)

    def launched(self, request: Request, step: Step, now: float) -> None:
        """Note that a step computes a chunk of a request's prompt."""
        if (offer := self._offer(request)) is not None:
            identity = self._scheduler.kv_identity
            self.machine.offers.launched(offer.handoff, request.launched, step.plan.step, identity, now)
            self._chunks.setdefault(step.plan.step, []).append((offer.handoff, request.launched))

    def step_ended(self, step: int, now: float) -> None:
        """Note that the device has done a step, whose result has come."""
        for handoff, num_tokens in self._chunks.pop(step, ()):
            self.machine.offers.computed(handoff, num_tokens, now)
        self.machine.offers.step_ended(step, now)

    def prompt_logprobs(self, request: Request, entries: list[TokenLogprob]) -> None:
        """Pass logprobs of prompt tokens on to the decode worker."""
        if (offer := self._offer(request)) is not None:
            self.machine.offers.add_logprobs(offer.handoff, entries)

    def first(self, request: Request, logprob: TokenLogprob | None, reason: FinishReason, now: float) -> None:
        """Hand the first token of a request over; call this before the request ends with it."""
        if (offer := self._offer(request)) is None:
            return
        first = First(
            handoff=offer.handoff,
            token=request.tokens[-1],
            logprob=logprob,
            version=request.versions[-1][0],
            cached_tokens=max(0, request.cached_tokens),
            seed=request.params.seed,
            parts=ceil_div(len(offer.logprobs), LOGPROBS_PER_PART),
            finished=None if reason == "handoff" else reason,
        )
        self.machine.offers.first(first, now)

    def take_over(self, request: Request) -> bool:
        """Let a request's offer take over the pages and the lock that it gives up; returns whether it has."""
        if (offer := self._offer(request)) is None:
            return False
        assert request.node is not None
        hold = HeldPages(list(request.pages), request.num_inserted, request.node)
        return self.machine.offers.take_over(offer.handoff, hold)

    def retracted(self, request: Request, now: float) -> None:
        """Note that the request has given up its KV, and waits."""
        if (offer := self._offer(request)) is not None:
            self.machine.offers.retracted(offer.handoff, now)

    def ended(self, request: Request, now: float) -> None:
        """Note that the request has ended."""
        if (offer := self._offer(request)) is not None:
            self.machine.offers.request_ended(offer.handoff, now)
        elif request.handoff is not None:
            lease = self.machine.leases.active.get(request.handoff.id)
            if lease is not None and lease.rid == request.rid:  # see `_offer`
                self.machine.leases.cancel(lease.handoff, now)

    def want_memory_back(self, now: float) -> None:
        """Free all pages of offers and leases, each as soon as no push reads or writes it any more."""
        self.machine.offers.withdraw_all(now)
        self.machine.leases.take_back_all("memory", now)

    def note_started(self) -> None:
        """Note, at the beginning of a pause, which requests have begun: a pause of mode ``wait`` awaits them.

        Those whose prompt the prefill worker has not begun are like waiting requests here and there. That
        worker may be paused too, so a pause that awaited them might never take effect.
        """
        for lease in self.machine.leases.active.values():
            if lease.state is not LeaseState.CLAIMED:
                self.awaiting[lease.rid].has_begun = True

    @property
    def has_started_requests(self) -> bool:
        """Whether a request that has begun awaits its KV."""
        return any(request.has_begun for request in self.awaiting.values())

    @property
    def vocab_size(self) -> int:
        """The number of token ids that the model knows."""
        return self._scheduler.vocab_size

    def may_start(self, rid: str) -> bool:
        """Whether pages may be granted to a request, and whether it may decode once its KV has landed."""
        return self._scheduler.control.admits or self.awaiting[rid].has_begun

    def committed(self, old: KVIdentity, new: KVIdentity) -> None:
        """Note that other weights are served."""
        self.machine.offers.committed(new)
        self.machine.leases.committed(old, new, self._scheduler.now)

    def counters(self) -> HandoverCounters:
        """Returns what has been done, and the numbers of offers and leases by state."""
        totals, machine = self._totals, self.machine
        totals.offers = Counter(offer.state.name.lower() for offer in machine.offers)
        totals.leases = Counter(lease.state.name.lower() for lease in machine.leases)
        totals.num_sent, totals.num_adopted = machine.offers.num_sent, self.adoption.num_adopted
        totals.num_pages = self.adoption.num_pages + machine.offers.num_pages_sent
        totals.adopt_s = self.adoption.seconds
        return totals

    # --- what it owns ---

    def holds(self) -> Iterator[tuple[str, HeldPages]]:
        """Yields what offers and leases own, with the owner's name."""
        for offer, hold in self.machine.offers.holds():
            yield f"offer {offer.handoff}", hold
        for lease, hold in self.machine.leases.holds():
            yield f"lease {lease.number} of handoff {lease.handoff}", hold

    @property
    def num_leaving(self) -> int:
        """Pages that are wanted back, but that other workers or pushes may still use."""
        offers = (hold for offer in self.machine.offers for hold in offer.draining)
        leases = (lease.hold for lease in self.machine.leases.leaving.values() if lease.hold is not None)
        return sum(len(hold.own_pages) for hold in (*offers, *leases))

    @property
    def owns_pages(self) -> bool:
        """Whether an offer or a lease owns pages or a lock."""
        return any(True for _ in self.holds())

    @property
    def frees_pages(self) -> bool:
        """Whether an offer or a lease owns pages that are freed before a known deadline."""
        leases = (each for each, _ in self.machine.leases.holds())
        return any(True for _ in self.machine.offers.holds()) or any(
            lease.state is not LeaseState.QUARANTINED for lease in leases
        )

    @property
    def has_lost_pages(self) -> bool:
        """Whether all pages that offers and leases own are of leases whose last word is long overdue.

        Pages that are only kept for a while, because nothing proves that their writer has gone or because the
        own ranks still make them ready, are not lost.
        """
        leases = [lease for lease, _ in self.machine.leases.holds()]
        is_late = all(self._scheduler.now >= lease.left_at + LOST_S for lease in leases)
        is_kept = any(lease.is_kept_for_a_while for lease in leases)
        return bool(leases) and is_late and not is_kept and not any(True for _ in self.machine.offers.holds())

    def fail_without_pages(self, request: Request) -> None:
        """End a request that needs pages of such leases: it might wait for ever."""
        s = self._scheduler
        lost = {lease.address for lease, _ in self.machine.leases.holds()}
        text = (
            f"request {request.rid} needs KV pages that a lost prefill engine may still write to "
            f"({', '.join(sorted(lost))}); send it again, and stop that engine if it hangs"
        )
        finished = s.end(request, "error", message=text, error=errors.KVCapacityLostError)
        self.replies.append(s.output(finished=[finished]))

    @property
    def num_places(self) -> int:
        """The number of request slots that leases keep."""
        return self.machine.leases.num_places

    def grant(self, now: float) -> None:
        """Grant pages to leases that wait for them, if there are enough."""
        self.machine.leases.grant_all(now)

    # --- the port of the machine ---

    def pages(self, rid: str) -> Sequence[int]:
        """Returns the pages of a running request."""
        return self._scheduler.running[rid].pages

    def release(self, hold: HeldPages) -> None:
        """Give back pages and a lock, once no step in flight uses them."""
        self._scheduler.free_later(pages=hold.own_pages, node=hold.node)

    def take(self, rid: str) -> HeldPages | None:
        """Take pages for a request's prompt; as in an admission, a reserve must stay available.

        What all leases own and what the longest running request may need must fit the pool together, so that
        this request can always go on, if need be alone.
        """
        s, request = self._scheduler, self.awaiting[rid]
        size, resources = s.limits.page_size, s.resources
        if len(resources.free_slots) <= self.num_places:
            return None
        num_tokens = request.prompt_len + request.num_given
        node = resources.prefix.root(s.kv_epoch, request.cache_salt)
        if not s.config.disable_prefix_cache:
            node = resources.prefix.match(s.kv_epoch, request.tokens, num_tokens, request.cache_salt)
        resources.prefix.lock(node)  # before counting: pages that it shares cannot be evicted for it
        shared = resources.prefix.pages(node)
        needed = ceil_div(num_tokens, size) - len(shared)
        alone = not s.running and not resources.pending_free and not self.frees_pages
        reserve = 0 if alone else s.reserve(request)
        leased = sum(len(hold.own_pages) for _, hold in self.machine.leases.holds())
        longest = max((ceil_div(r.prompt_len + r.most_outputs, size) for r in s.running.values()), default=0)
        if needed + reserve > resources.num_available or leased + needed + longest > s.limits.num_pages:
            resources.prefix.unlock(node)
            return None
        return HeldPages(shared + resources.take_pages(needed), len(shared), node)

    def take_first(self, rid: str, first: First, logprobs: list[TokenLogprob]) -> None:
        """Give a request its first token, and report it to the frontend."""
        s, request = self._scheduler, self.awaiting[rid]
        request.add_token(first.token, first.version)
        request.params = structs.replace(request.params, seed=first.seed)  # a client's part may have none
        request.outputs_launched = request.num_outputs
        request.has_begun |= s.control.admits
        request.first_at = s.now
        request.cached_tokens = first.cached_tokens
        if request.owes_prompt_logprobs:
            request.prompt_logprobs_next = request.prompt_len
        reason = first.finished or request.end_by_output()
        finished = [] if reason is None else [s.end(request, reason)]
        self.replies.append(
            s.output(
                rids=[rid],
                tokens=[first.token],
                finished=finished,
                logprobs={} if first.logprob is None else {rid: first.logprob},
                prompt_logprobs={rid: logprobs} if logprobs else {},
            )
        )

    def give_up(self, rid: str, reason: GiveUpReason, message: str) -> None:
        """The KV of a request will not come: it computes the prompt itself, or fails.

        A router's leg fails as long as its first token is not known, because the router can then choose
        another pair. Nobody else would send a request with ``bootstrap_room`` again, so it never fails.
        """
        request = self.awaiting[rid]
        assert request.handoff is not None
        if request.num_outputs > request.num_given or request.handoff.whole:
            self.compute(request, reason)
            return
        self._totals.failed[reason] = self._totals.failed.get(reason, 0) + 1
        why = f"{message or reason}; send it again"
        text = f"the KV of request {rid} will not come from {request.handoff.peer}: {why}"
        s = self._scheduler
        finished = s.end(request, "error", message=text, error=errors.HandoverError)
        self.replies.append(s.output(finished=[finished]))

    def compute(self, request: Request, reason: GiveUpReason) -> None:
        """Let a request compute its prompt here, like one that was retracted."""
        self._totals.recomputed[reason] = self._totals.recomputed.get(reason, 0) + 1
        request.has_begun |= self._scheduler.control.admits
        self._scheduler.leave(request, WAITING)
        self._scheduler.enqueue(request)

    def _offer(self, request: Request) -> Offer | None:
        """Returns the offer of a request's KV, as long as there is one.

        A request can go on after its offer, or its lease, has ended. Another request may have begun with the
        same handoff by then, and its offer or lease must not be touched.
        """
        if request.handoff is None or request.handoff.part != "prefill":
            return None
        offer = self.machine.offers.by_handoff.get(request.handoff.id)
        return offer if offer is not None and offer.rid == request.rid else None
