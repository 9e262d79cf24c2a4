"""Prefill: which prompts a step computes, and the admission of waiting requests to slots and pages.

A policy chooses the requests; the planner gives them what they need, as far as the step and the pages go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Protocol

from segue.kvcache.prefix_cache import Node
from segue.messages.requests import pack_ids
from segue.messages.steps import NewSlot
from segue.scheduler.request import PREFILL, WAITING, Request, Step
from segue.sizes import ceil_div

if TYPE_CHECKING:
    from segue.scheduler.scheduler import Scheduler

CLIP_MAX_NEW_TOKENS = 4096  # a client that leaves max_tokens open must not reserve the whole context


@dataclass(frozen=True, slots=True)
class PrefillView:
    """The prefill work that a policy may choose from."""

    started: Sequence[Request]  # admitted, with known tokens that have no KV yet, in the order of admission
    waiting: Sequence[Request]  # not admitted, in the order of the queue
    num_slots: int  # waiting requests that the step may admit
    budget: int  # tokens that the step may compute


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """The prefill work of one step."""

    requests: Sequence[Request]  # in this order; the first that cannot be admitted ends the step
    budget: int  # tokens of all of them together
    wake_at: float | None = None  # when to ask again although nothing has arrived; None: never


class PrefillPolicy(Protocol):
    """Decides the order of prefill work."""

    def pick(self, view: PrefillView, now: float) -> PrefillChoice:
        """Choose a step's prefill work. A policy that holds all work back must set ``wake_at``."""
        ...


class FirstCome:
    """Started prompts first, then waiting requests in the order of the queue."""

    def pick(self, view: PrefillView, now: float) -> PrefillChoice:
        """Choose as much as fits."""
        return PrefillChoice([*view.started, *islice(view.waiting, view.num_slots)], view.budget)


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

    def __init__(self, scheduler: Scheduler, policy: PrefillPolicy) -> None:
        self._scheduler = scheduler
        self._policy = policy

    def fill(self, step: Step, now: float, *, admit: bool) -> float | None:
        """Add prefill chunks to a step; returns when to plan again if the policy holds work back.

        With ``admit=False`` no waiting request is admitted. The full pages of a chunk are shared at once:
        steps run in launch order, and each layer stores all KV of a step before it reads any. Later requests
        of the same step can therefore read these pages, so equal prompts sent together are computed once.
        """
        s = self._scheduler
        # During a pause of mode "wait" only requests that have begun may start again.
        waiting = s.waiting if s.control.admits else [request for request in s.waiting if request.has_begun]
        view = PrefillView(
            started=[request for request in s.running.values() if request.phase is PREFILL],
            waiting=waiting if admit else (),
            num_slots=len(s.resources.free_slots),
            budget=s.limits.chunked_prefill_size,
        )
        if not (view.started or view.waiting):
            return None
        choice = self._policy.pick(view, now)
        budget = choice.budget
        for request in tuple(choice.requests):  # a policy may return the queue itself, which changes here
            if budget <= 0 or (request.phase is WAITING and not self._admit(request, step)):
                break
            budget -= step.prefill(request, budget)
            s.insert_pages(request, request.launched)
        return choice.wake_at

    def _admit(self, request: Request, step: Step) -> bool:
        """Give a request a slot and pages for all its known tokens, and add them to the step's plan.

        Returns False, and changes nothing, if no slot is free or if fewer pages than the reserve (see
        `_reserve`) would stay available. A request that is alone is admitted without a reserve: no
        other one will end and free pages.
        """
        s, resources, size = self._scheduler, self._scheduler.resources, self._scheduler.limits.page_size
        if not resources.free_slots:
            return False
        node = self._match(request)
        resources.prefix.lock(node)  # before counting: pages that it shares cannot be evicted for it
        shared = resources.prefix.pages(node)
        needed = ceil_div(len(request.tokens), size) - len(shared)
        alone = not s.running and not resources.pending_free
        if needed + (0 if alone else self._reserve(request)) > resources.num_available:
            resources.prefix.unlock(node)
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
        if s.config.disable_prefix_cache:
            return s.resources.prefix.root(s.kv_epoch)
        usable = len(request.tokens) - 1  # the last token is always computed, because its logits are needed
        if request.owes_prompt_logprobs:
            usable = min(usable, max(0, request.prompt_logprobs_next - 1))
        return s.resources.prefix.match(s.kv_epoch, request.tokens, usable)

    def _reserve(self, newcomer: Request) -> int:
        """Pages that the running requests and the newcomer are expected to need for their output tokens.

        This is the reserve of an admission: their remaining limits, each clipped, times the new-token ratio.
        """
        s = self._scheduler
        tokens = sum(
            min(request.most_outputs - request.outputs_launched, CLIP_MAX_NEW_TOKENS)
            for request in (*s.running.values(), newcomer)
        )
        return int(tokens * s.new_token_ratio.value) // s.limits.page_size
