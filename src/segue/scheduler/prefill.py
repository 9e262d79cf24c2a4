"""Prefill: which prompts a step computes, and the admission of waiting requests to slots and pages.

A policy chooses the requests; the planner gives them what they need, as far as the step and the pages go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, get_args

from segue.kvcache.prefix_cache import Node
from segue.laps.classes import PromptClass
from segue.laps.cost import CostModel, StepWork
from segue.laps.pick import LapsPolicy, PrefillChoice, PrefillPolicy, PrefillView
from segue.messages.control import EngineLimits, LapsCounters
from segue.messages.requests import pack_ids
from segue.messages.steps import NewSlot
from segue.scheduler.request import PREFILL, WAITING, Request, Step
from segue.sizes import ceil_div

if TYPE_CHECKING:
    from segue.scheduler.scheduler import Scheduler

HEAD_STEPS = 8  # between two looks into the prefix cache for the same prompt, which cost some microseconds
CLIP_MAX_NEW_TOKENS = 4096  # a client that leaves max_tokens open must not reserve the whole context


class FirstCome:
    """Started prompts first, then waiting requests in the order of the queue, as many as fit."""

    def classify(self, tokens: int, history: int) -> PromptClass:
        """Returns one class for all."""
        return "short"

    def pick(self, view: PrefillView[Request], now: float) -> PrefillChoice[Request]:
        """Choose as much as fits."""
        prompts = [*view.started, *islice(view.short, view.num_slots)]
        return PrefillChoice(prompts=prompts, budget=view.budget)

    def expects_short(self, seconds: float, now: float) -> bool:
        """Returns False: no prompt goes before others."""
        return False

    def arrived(self, prompt: Request, now: float) -> None:
        """Nothing depends on it."""

    def planned(self, work: StepWork, long: StepWork, *, long_waits: bool) -> None:
        """Nothing depends on it."""

    def ended(self, work: StepWork, seconds: float, now: float) -> None:
        """Nothing depends on it."""

    def report(self, waiting: dict[str, int]) -> LapsCounters | None:
        """Returns None: there are no classes."""
        return None


def make_policy(limits: EngineLimits, cost: CostModel) -> PrefillPolicy[Request]:
    """Returns the policy that an engine's limits ask for."""
    if limits.laps is None:
        return FirstCome()
    return LapsPolicy(limits.laps, cost, limits.page_size, limits.step_sizes)


@dataclass(slots=True, kw_only=True)
class NewTokenRatio:
    """The share of their remaining output tokens that running requests are expected to need.

    Admission keeps room for that many tokens free. The ratio decays a little with every step, because most
    requests end before their limit, and rises with every preemption, which shows that it was too low.
    """

    initial: float = 0.7
    minimum: float = 0.1
    decay: float = (0.7 - 0.1) / 600  # from initial to minimum in 600 steps
    rise: float = 0.2
    value: float = 0.7

    def on_step(self) -> None:
        """Decay the ratio; call it once per launched step."""
        self.value = max(self.minimum, self.value - self.decay)

    def on_preemption(self) -> None:
        """Raise the ratio; call it for every request that is retracted because pages ran out."""
        self.value = min(1.0, self.value + self.rise)


class PrefillPlanner:
    """Fills steps with prefill chunks, and admits waiting requests."""

    def __init__(self, scheduler: Scheduler, policy: PrefillPolicy[Request]) -> None:
        self._scheduler = scheduler
        self.policy = policy
        # The long prompt that would be next when one was last classified anew, and when that was.
        self._head: tuple[str, int] = "", 0

    def classify(self, request: Request) -> None:
        """Set the class of a request that is to wait, by the tokens that the prefix cache does not have."""
        request.expected_hit = 0
        request.prompt_class = self.policy.classify(request.remaining, 0)
        if request.prompt_class == "long":  # only then does it pay to look
            num_pages = sum(1 for _ in self._match(request).path())
            request.expected_hit = num_pages * self._scheduler.limits.page_size
            request.prompt_class = self.policy.classify(request.remaining, request.expected_hit)

    def fill(self, step: Step, now: float, *, admit: bool) -> float | None:
        """Add prefill chunks to a step; returns when to plan again if the policy holds work back.

        With ``admit=False`` no waiting request is admitted. The full pages of a chunk are shared at once:
        steps run in launch order, and each layer stores all KV of a step before it reads any. Later requests
        of the same step can therefore read these pages, so equal prompts sent together are computed once.
        """
        s = self._scheduler
        self._classify_head()
        started = [request for request in s.running.values() if request.phase is PREFILL]
        for request in started:  # the end of a long prompt is short
            request.prompt_class = self.policy.classify(request.remaining, request.launched)
        short, long = (self._waiting(name) for name in get_args(PromptClass))
        num_slots = len(s.resources.free_slots) - s.handover.num_places if admit else 0
        if not (started or (num_slots and (short or long))):
            return None
        view = PrefillView(
            started=started,
            short=short,
            long=long,
            num_slots=num_slots,
            budget=s.limits.chunked_prefill_size,
            beside=step.work,
            is_idle=len(s.in_flight) == 1 and not step.work.tokens,  # the one is this step
        )
        choice = self.policy.pick(view, now)
        budget = choice.budget
        for request in tuple(choice.prompts):  # a policy may return the queue itself, which changes here
            room = choice.room
            if budget <= 0 or (room is not None and room(request, step.work) == 0):
                break
            if request.phase is WAITING:
                if not (admit and self._admit(request, step)):
                    admit = False  # those that have started may go on
                    continue
                request.prompt_class = self.policy.classify(request.remaining, request.launched)
            count = budget if room is None else min(budget, room(request, step.work))
            if count > 0:  # else it found less in the cache than was expected: it has to wait for its turn
                budget -= step.prefill(request, count)
                s.insert_pages(request, request.launched)
                s.handover.launched(request, step, now)
        long_waits = bool(long) or any(request.prompt_class == "long" for request in started)
        self.policy.planned(step.work, step.long_work, long_waits=long_waits)
        return choice.wake_at

    def _waiting(self, prompt_class: PromptClass) -> Sequence[Request]:
        """Returns the waiting requests of a class that may be admitted.

        During a pause of mode ``wait`` only requests that have begun may start again.
        """
        s, waiting = self._scheduler, self._scheduler.waiting.of(prompt_class)
        if s.control.admits and s.can_guide:
            return waiting
        return [r for r in waiting if (s.control.admits or r.has_begun) and s.may_guide(r)]

    def _classify_head(self) -> None:
        """Classify the first long prompt anew, from time to time: others may have computed its prefix."""
        long = self._scheduler.waiting.of("long")
        head = (long[0].rid, self._scheduler.totals.num_steps // HEAD_STEPS) if long else self._head
        if head != self._head:
            request, self._head = long[0], head
            self._scheduler.waiting.remove(request)
            self.classify(request)
            self._scheduler.waiting.add(request)

    def _admit(self, request: Request, step: Step) -> bool:
        """Give a request a slot and pages for all its known tokens, and add them to the step's plan.

        Returns False, and changes nothing, if no slot is free or if fewer pages than the reserve (see
        `reserve`) would stay available. A request that is alone is admitted without a reserve: no
        other one will end and free pages.
        """
        s, resources, size = self._scheduler, self._scheduler.resources, self._scheduler.limits.page_size
        if len(resources.free_slots) <= s.handover.num_places:
            return False
        node = self._match(request)
        resources.prefix.lock(node)  # before counting: pages that it shares cannot be evicted for it
        shared = resources.prefix.pages(node)
        needed = ceil_div(len(request.tokens), size) - len(shared)
        alone = not s.running and not resources.pending_free and not s.handover.frees_pages
        if needed + (0 if alone else self.reserve(request)) > resources.num_available:
            resources.prefix.unlock(node)
            idle = not s.running and not resources.pending_free
            if idle and needed > resources.num_available and s.handover.has_lost_pages:
                s.handover.fail_without_pages(request)
            return False
        s.leave(request, PREFILL)
        s.running[request.rid] = request
        request.has_begun = True
        request.slot = resources.free_slots.pop()
        request.node, request.num_inserted = node, len(shared)
        request.kv_epoch = s.kv_epoch
        request.pages = shared + resources.take_pages(needed)
        request.capacity = len(request.pages) * size
        request.launched = len(shared) * size
        if request.cached_tokens < 0:
            request.cached_tokens = min(request.launched, request.prompt_len)
        request.admitted_at = request.admitted_at or step.planned_at
        s.totals.prompt_tokens += len(request.tokens)
        s.totals.cached_tokens += request.launched
        step.plan.new_slots.append(
            NewSlot(request.slot, pack_ids(request.tokens), request.prompt_len, request.params)
        )
        step.plan.pages.append((request.slot, 0, list(request.pages)))
        return True

    def _match(self, request: Request) -> Node:
        """Return the deepest cached node that the request can start from; the root if nothing is cached.

        Positions whose logits the request needs are computed even if their KV is cached.
        """
        s = self._scheduler
        if s.config.disable_prefix_cache or not request.shares_kv:
            return s.resources.prefix.root(s.kv_epoch, request.cache_salt)
        usable = len(request.tokens) - 1  # the last token is always computed, because its logits are needed
        if request.owes_prompt_logprobs:
            usable = min(usable, max(0, request.prompt_logprobs_next - 1))
        return s.resources.prefix.match(s.kv_epoch, request.tokens, usable, request.cache_salt)

    def reserve(self, newcomer: Request) -> int:
        """Pages that the running requests and the newcomer are expected to need for their output tokens.

        This is the reserve of an admission: their remaining limits, each clipped, times the new-token ratio.
        """
        s = self._scheduler
        tokens = sum(
            min(request.most_outputs - request.outputs_launched, CLIP_MAX_NEW_TOKENS)
            for request in (*s.running.values(), newcomer)
        )
        return int(tokens * s.new_token_ratio.value) // s.limits.page_size
