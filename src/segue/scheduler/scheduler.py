"""The pure scheduler: plain data in, plain data out; no torch, no sockets, no clock of its own.

``plan()`` decides a step and counts it as launched; ``apply()`` takes its result. With overlap the loop calls
``plan()`` for step *n + 1* before ``apply()`` of step *n*: lengths are known by then, but tokens are not.
All times are in seconds of one monotonic clock, which the caller reads.

A request leaves the queue or the batch through :meth:`Scheduler.leave` alone. A table says what it gives
back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any, get_args

from segue import errors
from segue.config import EngineConfig
from segue.kvcache.journal import FoundPages
from segue.kvcache.prefix_cache import Node
from segue.laps.classes import PromptClass
from segue.laps.cost import CostModel, StepTime
from segue.laps.pick import PrefillPolicy
from segue.messages.control import Counters, EngineLimits, LapsCounters, SchedulerOutput
from segue.messages.kv import KVIdentity
from segue.messages.requests import (
    BEFORE_PREFILL,
    Abort,
    AddRequest,
    Finish,
    Finished,
    FinishReason,
    PhaseTimes,
    Rejected,
    unpack_ids,
)
from segue.messages.steps import StepPlan, StepResult
from segue.scheduler.handover import Handover
from segue.scheduler.pace import Pace
from segue.scheduler.pause import PauseControl, PauseState
from segue.scheduler.prefill import NewTokenRatio, PrefillPlanner, make_policy
from segue.scheduler.queue import WaitingQueue
from segue.scheduler.refusals import check_request
from segue.scheduler.request import AWAIT, DECODE, FINISHED, PREFILL, WAITING, Request, RequestPhase, Step
from segue.scheduler.resources import Released, Resources
from segue.scheduler.results import take_result
from segue.scheduler.role import RoleControl
from segue.scheduler.standby import Standby
from segue.scheduler.weight_port import WeightPort

GUIDES_LOOK_S = 0.01  # between two looks whether grammars can be followed, while nothing else is to be done


class Scheduler:
    """Decides what each step runs. Nothing else starts, retracts or ends a request."""

    def __init__(
        self,
        limits: EngineLimits,
        config: EngineConfig,
        policy: PrefillPolicy[Request] | None = None,
        step_times: Iterable[StepTime] = (),
        *,
        num_ranks: int = 1,
        vocab_size: int = 1 << 31,
    ) -> None:
        """Start with nothing queued.

        Args:
            limits: what the engine has room for.
            config: the options.
            policy: chooses the prefill work; None: the policy that ``limits`` asks for.
            step_times: steps that were timed at start, from which the cost model learns before any request.
            num_ranks: the number of tensor-parallel ranks.
            vocab_size: token ids are below it.
        """
        self.limits = limits
        self.config = config
        self.vocab_size = vocab_size
        self.now = 0.0  # the caller sets it before a call that has no time of its own
        self.wake_at: float | None = None  # when `plan` may give a step although nothing arrives; None: never
        self.can_guide = True  # by the caller; False: requests with a grammar are not admitted yet
        self.weights = WeightPort(self)
        self.resources = Resources(limits, publishes=config.warm_kv)
        self.new_token_ratio = NewTokenRatio()
        self.cost = CostModel()
        for work, seconds in step_times:
            self.cost.add(work, seconds)
        self.waiting = WaitingQueue()
        self.running: dict[str, Request] = {}  # in the order of admission
        self.requests: dict[str, Request] = {}  # every request that has not ended, waiting or running
        self.in_flight: deque[Step] = deque()  # launched steps without a result, and the one being planned
        # (request, first index, pages): block table entries that the next plan replaces
        self._swaps: list[tuple[Request, int, list[int]]] = []
        self._pace = Pace()
        self._step = 0
        self._arrivals = 0
        self.num_decode_steps = 0
        self.num_flushes = 0  # how often the prefix cache was emptied
        self.totals = Counters()
        self.control = PauseControl(self)
        self._prefill = PrefillPlanner(self, policy or make_policy(limits, self.cost))
        self.handover = Handover(self, num_ranks)
        self.roles = RoleControl(self, config.role)
        self.standby = Standby(self, num_ranks)

    # --- the start and the end of requests ---

    def add(self, message: AddRequest, now: float) -> Rejected | Finished | None:
        """Queue a request.

        Returns None, or the rejection with its reason, or the end of a request whose outputs already end it.
        """
        prompt_len, num_outputs = len(message.prompt) // 4, len(message.outputs) // 4  # ids of 4 bytes
        most_outputs = min(message.params.max_new_tokens, self.limits.max_seq_len - prompt_len)
        try:
            check_request(self, message, prompt_len, num_outputs, most_outputs)
        except errors.SegueError as error:
            return Rejected(message.rid, type(error).__name__, error.message)
        handoff, hands_over = message.handoff, False
        if handoff is not None and handoff.part == "prefill":
            hands_over = most_outputs > num_outputs + 1
            most_outputs = min(most_outputs, num_outputs + 1)
        self._arrivals += 1
        request = self.requests[message.rid] = Request(
            rid=message.rid,
            params=message.params,
            tokens=unpack_ids(message.prompt + message.outputs),
            prompt_len=prompt_len,
            num_given=num_outputs,
            most_outputs=most_outputs,
            hands_over=hands_over,
            handoff=handoff,
            phase=AWAIT if handoff is not None and handoff.part == "decode" else WAITING,
            priority=message.priority,
            arrival=self._arrivals,
            added_at=now,
            # During a pause it counts as a newcomer: a pause that has taken effect waits for no further one.
            has_begun=num_outputs > 0 and self.control.admits,
            shares_kv=message.shares_kv,
            cache_salt=message.cache_salt,
        )
        if request.phase is WAITING:
            self.enqueue(request)
            request.came_long = request.prompt_class == "long"
            self._prefill.policy.arrived(request, now)
        if handoff is not None:
            self.handover.add(request, handoff, now)
        reason = request.end_by_output() if num_outputs else None
        return None if reason is None else self.end(request, reason)

    def abort(self, message: Abort) -> list[Finished]:
        """End one request or all requests; they keep the tokens that they have. Unknown ids are ignored."""
        if message.abort_all:
            return self.abort_all(message.message)
        request = self.requests.get(message.rid)
        return [self._abort(request, message.message)] if request else []

    def abort_all(self, message: str | None = None) -> list[Finished]:
        """End every request; they keep the tokens that they have."""
        return [self._abort(request, message) for request in list(self.requests.values())]

    def finish(self, message: Finish) -> list[Finished]:
        """End a request at a stop string; nothing happens if it has ended already."""
        request = self.requests.get(message.rid)
        return [self.end(request, "stop", num_tokens=message.num_tokens)] if request else []

    def _abort(self, request: Request, message: str | None) -> Finished:
        if message is None and request.cached_tokens < 0:
            message = BEFORE_PREFILL
        return self.end(request, "abort", message=message)

    def end(
        self,
        request: Request,
        reason: FinishReason,
        *,
        num_tokens: int | None = None,
        message: str | None = None,
        error: type[errors.SegueError] | None = None,
    ) -> Finished:
        """End a request; every end goes through here. Without ``num_tokens`` it keeps all its tokens."""
        self.leave(request, FINISHED)
        del self.requests[request.rid]
        self.handover.ended(request, self.now)
        count = request.num_outputs if num_tokens is None else num_tokens
        return Finished(
            rid=request.rid,
            reason=reason,
            num_tokens=count,
            prompt_tokens=request.prompt_len,
            cached_tokens=max(0, request.cached_tokens),
            # A stop string, which the frontend finds, cuts the output; a stop token is the last one. Neither
            # is there where a grammar is complete.
            matched=request.tokens[-1]
            if reason == "stop" and num_tokens is None and request.tokens[-1] in request.stop_ids
            else None,
            message=message,
            versions=[
                (v, start, min(end, count))
                for v, start, end in request.versions
                if start < count or not request.most_outputs
            ],
            error=None if error is None else error.__name__,
            times=PhaseTimes(
                added=request.added_at,
                admitted=request.admitted_at,
                prefilled=request.first_at,
                taken_over=request.taken_over_at,
            ),
        )

    def retract(self, request: Request) -> None:
        """Put a request back into the queue with its tokens but without KV. Nothing may be in flight."""
        assert not self.in_flight
        self.leave(request, WAITING)
        request.forget_kv()
        self.handover.retracted(request, self.now)
        self.enqueue(request)  # before younger ones

    def leave(self, request: Request, to: RequestPhase) -> None:
        """Move a request from its phase ``to`` another one, and give back what it held in the old one.

        Every end, retraction and admission goes through here, so nothing that a request holds is forgotten.
        """
        for give_back in _GIVES_BACK[request.phase]:
            give_back(self, request)
        request.enter(to)

    def enqueue(self, request: Request) -> None:
        self._prefill.classify(request)
        self.waiting.add(request)

    def reserve(self, newcomer: Request) -> int:
        """Returns the pages that must stay available when a request is admitted."""
        return self._prefill.reserve(newcomer)

    def may_guide(self, request: Request) -> bool:
        """Whether a request has no grammar, or grammars can be followed now."""
        return self.can_guide or request.params.grammar is None

    def _leave_queue(self, request: Request) -> None:
        self.waiting.remove(request)

    def _leave_batch(self, request: Request) -> None:
        del self.running[request.rid]

    def _release(self, request: Request) -> None:
        """Release its slot, its own pages and its lock on cached ones, once no step in flight uses them."""
        self._swaps = [swap for swap in self._swaps if swap[0] is not request]
        self.handover.adoption.forget(request)
        if self.handover.take_over(request):
            self.free_later(slot=request.slot)
        else:
            self.free_later(slot=request.slot, pages=request.own_pages, node=request.node)

    def _leave_await(self, request: Request) -> None:
        del self.handover.awaiting[request.rid]

    def free_later(
        self, *, slot: int | None = None, pages: Sequence[int] = (), node: Node | None = None
    ) -> None:
        """Free a slot and pages, and unlock a node, once no step in flight uses them."""
        self.resources.pending_free.append(Released(self._step, slot, list(pages), node))
        self.settle()

    def settle(self) -> None:
        """Free what was released before the oldest step in flight; everything, if no step is in flight."""
        self.resources.settle(self.in_flight[0].plan.step if self.in_flight else self._step + 1)

    # --- what others ask ---

    @property
    def weight_version(self) -> str:
        """The name of the weights that the next step runs with."""
        return self.weights.weight_version

    @property
    def kv_epoch(self) -> int:
        """The number of commits of weights so far."""
        return self.weights.kv_epoch

    @property
    def kv_identity(self) -> KVIdentity:
        """The name of the KV that is computed now."""
        return self.weights.kv_identity

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a slot, or for KV of another worker."""
        return len(self.waiting) + len(self.handover.awaiting)

    @property
    def has_work(self) -> bool:
        """Whether a step could be planned now, or after the step in flight."""
        if self.control.admits:
            return bool(self.running or self.waiting or self.handover.adoption.has_landed)
        return self.control.runs and self.control.has_started_requests

    # --- planning ---

    def plan(self, now: float) -> StepPlan | None:
        """Decide the next step: one token per decoding request, then prefill chunks.

        A request whose pages are full takes one more. If too few pages are left, requests are retracted, the
        last of the queue's order first, and none is admitted in that step.

        Returns None if nothing can run, or not before the step in flight is applied, or, if :attr:`wake_at`
        is set, not before that time.
        """
        assert len(self.in_flight) <= 1, "apply the oldest step before planning another"
        self.now, self.wake_at = now, None
        if not self.control.runs:
            return None
        self.handover.adoption.adopt(now)
        decoding = [r for r in self.running.values() if r.wants_decode]
        needy = [r for r in decoding if r.launched == r.capacity]  # their next position needs a new page
        preempted = False
        if len(needy) > self.resources.num_available:
            if self.in_flight:  # its result may end requests, which frees pages: nobody is retracted before
                return None
            if not self._preempt(needy):
                return None
            preempted = True
            decoding = [r for r in decoding if r.phase is DECODE]
            needy = [r for r in needy if r.phase is DECODE]
        self._step += 1
        step = Step(StepPlan(self._step), self.weights.weight_version, now)
        self.in_flight.append(step)
        swaps, self._swaps = self._swaps, []  # what this step's own insertions swap goes into the next plan
        step.plan.pages += [(request.slot, first, pages) for request, first, pages in swaps]
        self.handover.adoption.announce(step)
        for request, page in zip(needy, self.resources.take_pages(len(needy)), strict=True):
            step.plan.pages.append((request.slot, len(request.pages), [page]))
            request.pages.append(page)
            request.capacity += self.limits.page_size
        step.decode(decoding)
        self.handover.adoption.share()
        if not preempted:
            self.handover.grant(now)
        self.wake_at = self._prefill.fill(step, now, admit=not preempted)
        if not self.can_guide:
            self.wake_at = min(self.wake_at or inf, now + GUIDES_LOOK_S)
        if not step.plan.slots:  # there is nothing to run: as if the step had never been planned
            self.in_flight.pop()
            self._step -= 1
            self._swaps = swaps
            return None
        self.totals.num_steps += 1
        self.num_decode_steps += step.plan.num_decode > 0
        self.new_token_ratio.on_step()
        return step.plan

    def launched(self, now: float) -> None:
        """Note that the host has launched the step that was planned last; see :mod:`.pace`."""
        self._pace.launched(self.in_flight[-1], now)

    def launch_at(self, now: float) -> float:
        """Returns when the next step should be launched, behind the oldest in flight; see :mod:`.pace`."""
        return self._pace.launch_at(self.in_flight[0], self.cost, self._prefill.policy, now)

    def _preempt(self, needy: Iterable[Request]) -> bool:
        """Retract running requests until each request of ``needy`` that still runs can have a page.

        Returns False if the last one has to wait for pages of offers and leases; it fails if they may never
        come home. Without these a request that is alone always fits: ``max_seq_len`` is at most the pool.
        """
        needy = set(needy)
        while len(needy) > self.resources.num_available:
            if len(self.running) == 1:
                if not self.handover.has_lost_pages:
                    return False
                (last,) = self.running.values()
                self.handover.fail_without_pages(last)
                needy.discard(last)
                continue
            victim = max(self.running.values(), key=Request.queue_key)  # it would be last in the queue
            self.retract(victim)
            needy.discard(victim)
            self.totals.num_preemptions += 1
            self.new_token_ratio.on_preemption()
        return True

    # --- results ---

    def apply(self, result: StepResult, now: float) -> SchedulerOutput:
        """Turn the oldest step's result into tokens and ends; the tokens of ended requests are dropped."""
        self.now = now
        step = self.in_flight.popleft()
        seconds = self._pace.ended(step, now)
        self.cost.add(step.work, seconds)
        self.handover.step_ended(step.plan.step, now)
        self._prefill.policy.ended(step.work, seconds, now)
        output = take_result(self, step, result, now)
        if (publisher := self.resources.publisher) is not None:
            publisher.applied(result.step)
        return output

    def insert_pages(self, request: Request, computed: int) -> None:
        """Insert the full pages among the first ``computed`` positions into the prefix cache.

        If the cache already has a page with the same tokens, the request uses that one and frees its own.
        """
        if not request.shares_kv or self.config.disable_prefix_cache:
            return
        if request.kv_epoch != self.weights.kv_epoch:
            return  # all pages of a cached path have the KV of one epoch
        publisher = self.resources.publisher
        size, first = self.limits.page_size, request.num_inserted
        node, pages, given_back = request.node, request.pages, list[int]()
        assert node is not None
        for index in range(first, computed // size):
            key = tuple(request.tokens[index * size : (index + 1) * size])
            node = self.resources.prefix.extend(node, key, pages[index])
            if node.page != pages[index]:
                given_back.append(pages[index])
                pages[index] = node.page
            elif publisher is not None and not request.cache_salt:  # the journal has no salts
                publisher.inserted(node, self._step)
            request.num_inserted += 1
        request.node = node
        # Duplicates come first: a page that is new to the cache has no children. The block table on the
        # device has the request's own pages until the next plan; they are freed after the steps in flight.
        if given_back:
            self._swaps.append((request, first, pages[first : first + len(given_back)]))
            self.free_later(pages=given_back)

    def adopt_pages(self, found: FoundPages) -> None:
        """Share pages whose KV another engine has computed, with the weights of now. Nothing may have run."""
        assert not self.requests and not self._step and not self.resources.prefix.num_pages
        self.resources.adopt(found, self.kv_epoch)

    def output(self, **columns: Any) -> SchedulerOutput:
        """Returns a message to the frontend with the present counters; ``columns`` are its other fields."""
        totals = self.totals
        totals.paused = self.control.client_mode
        totals.is_paused = self.control.client_state is PauseState.PAUSED
        totals.num_running, totals.num_waiting = len(self.running), self.num_waiting
        totals.num_accepted = self._arrivals
        totals.used_pages = self.limits.num_pages - len(self.resources.free_pages)
        totals.cached_pages = self.resources.prefix.num_pages
        totals.taken_pages = self.limits.num_pages - self.resources.num_available
        totals.laps = self.report_laps()
        totals.released = sorted(self.standby.away)
        if self.config.role != "both":
            totals.handover = self.handover.counters()
        return SchedulerOutput(**({"rids": [], "tokens": [], "finished": []} | columns), counters=totals)

    def report_laps(self) -> LapsCounters | None:
        """Returns what length-aware prefill has done so far, and how things are now; None: it is off."""
        waiting = {name: len(self.waiting.of(name)) for name in get_args(PromptClass)}
        return self._prefill.policy.report(waiting)

    def forget_cache(self) -> int:
        """Empty the prefix cache, and reset the new-token ratio and the number of decode steps.

        Returns the number of tokens that were cached.
        No step may be in flight and no request may own KV. What offers and leases have locked stays until
        they end.
        """
        assert not self.in_flight and not self.running
        prefix = self.resources.prefix
        count = prefix.num_evictable
        if (publisher := self.resources.publisher) is not None:
            publisher.forget_all()
        self.resources.free(prefix.evict(count))
        self.num_flushes += 1
        self.new_token_ratio = NewTokenRatio()
        self.num_decode_steps = 0
        return count * self.limits.page_size


# What a request gives back when it ends or is retracted, by the phase that it leaves.
_GIVES_BACK: dict[RequestPhase, Sequence[Callable[[Scheduler, Request], None]]] = {
    AWAIT: (Scheduler._leave_await,),
    WAITING: (Scheduler._leave_queue,),
    PREFILL: (Scheduler._leave_batch, Scheduler._release),
    DECODE: (Scheduler._leave_batch, Scheduler._release),
}
