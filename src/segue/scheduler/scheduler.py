"""The pure scheduler: plain data in, plain data out; no torch, no sockets, no clock.

``plan()`` decides a step and counts it as launched; ``apply()`` takes its result. With overlap the loop calls
``plan()`` for step *n + 1* before ``apply()`` of step *n*: lengths are known by then, but tokens are not.

Only :meth:`Scheduler._release` releases a request's slot, pages and prefix lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import isnan
from typing import Any

from segue.errors import (
    ContextLengthError,
    InvalidRequestError,
    NonFiniteLogitsError,
    OverloadedError,
    PausedError,
    PoisonedError,
    SegueError,
)
from segue.kvcache.prefix_cache import Node
from segue.messages.control import Counters, EngineLimits, SchedulerOutput
from segue.messages.requests import (
    BEFORE_PREFILL,
    FIRST_WEIGHT_VERSION,
    Abort,
    AddRequest,
    Finish,
    Finished,
    FinishReason,
    Rejected,
    TokenLogprob,
    pack_ids,
    unpack_ids,
)
from segue.messages.steps import NON_FINITE, NewSlot, StepPlan, StepResult
from segue.scheduler.invariants import find_problems
from segue.scheduler.pause import PauseControl, PauseState
from segue.scheduler.queue import NewTokenRatio, WaitingQueue, choose_victim, expected_tokens
from segue.scheduler.request import Request, RequestPhase
from segue.scheduler.resources import Resources
from segue.scheduler.step import Step


class SchedulerLimits(EngineLimits, frozen=True, kw_only=True):
    """What the engine has room for, and the options that limit requests."""

    max_queued_requests: int
    prefix_cache: bool = True
    reject_while_paused: bool = False  # False: requests that arrive during a pause are queued
    receive_requires_pause: bool = False  # weights are received only while generation is paused


class Scheduler:
    """Decides what each step runs. Nothing else starts, retracts or ends a request."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.weight_version = FIRST_WEIGHT_VERSION
        self.kv_epoch = 0  # grows with every commit of weights, even if the version's name stays the same
        self.poisoned: str | None = None  # why the weights are, and every new request is rejected
        self.resources = Resources(
            num_slots=limits.max_running_requests, num_pages=limits.num_pages, page_size=limits.page_size
        )
        self.new_token_ratio = NewTokenRatio()
        self.waiting = WaitingQueue()
        self.running: dict[str, Request] = {}  # in the order of admission
        self.requests: dict[str, Request] = {}  # every request that has not ended, waiting or running
        self.in_flight: deque[Step] = deque()  # launched steps without a result, and the one being planned
        # (request, first index, pages): block table entries that the next plan replaces
        self._swaps: list[tuple[Request, int, list[int]]] = []
        self._step = 0
        self._arrivals = 0
        self.num_decode_steps = 0
        self.totals = Counters()
        self.control = PauseControl(self)

    # --- the start and the end of requests ---

    def add(self, message: AddRequest) -> Rejected | None:
        """Queue a request; returns None, or the rejection with its reason."""
        prompt_len = len(message.prompt) // 4
        if message.rid in self.requests:
            return _rejected(message, InvalidRequestError, f"rid {message.rid!r} is in flight; use another")
        if self.poisoned is not None:
            text = f"the weights are poisoned ({self.poisoned}); update all of them, or start again"
            return _rejected(message, PoisonedError, text)
        if not 1 <= prompt_len < self.limits.max_seq_len:
            rule = f"must have 1 to {self.limits.max_seq_len - 1}, so that one more token fits the context"
            return _rejected(message, ContextLengthError, f"the prompt has {prompt_len} tokens, but {rule}")
        if self.limits.reject_while_paused and (mode := self.control.client_mode) is not None:
            text = f"generation is paused ({mode}), and --paused-policy is reject; retry later"
            return _rejected(message, PausedError, text)
        if len(self.waiting) >= self.limits.max_queued_requests:
            text = f"{len(self.waiting)} requests wait, the limit set by --max-queued-requests; retry later"
            return _rejected(message, OverloadedError, text)
        self._arrivals += 1
        request = Request(
            rid=message.rid,
            prompt=unpack_ids(message.prompt),
            params=message.params,
            priority=message.priority,
            arrival=self._arrivals,
            max_new_tokens=min(message.params.max_new_tokens, self.limits.max_seq_len - prompt_len),
        )
        self.requests[request.rid] = request
        self.waiting.push(request)
        return None

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
        return [self._end(request, "stop", num_tokens=message.num_tokens)] if request else []

    def _abort(self, request: Request, message: str | None) -> Finished:
        if message is None and request.cached_tokens < 0:
            message = BEFORE_PREFILL
        return self._end(request, "abort", message=message)

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        *,
        num_tokens: int | None = None,
        matched: int | None = None,
        message: str | None = None,
        error: type[SegueError] | None = None,
    ) -> Finished:
        """End a request and release what it holds; every end of a request goes through here."""
        if request.phase is RequestPhase.WAITING:
            self.waiting.remove(request)
        else:
            del self.running[request.rid]
            self._release(request)
        del self.requests[request.rid]
        request.enter(RequestPhase.FINISHED)
        count = request.num_outputs if num_tokens is None else num_tokens
        return Finished(
            rid=request.rid,
            reason=reason,
            num_tokens=count,
            prompt_tokens=request.prompt_len,
            cached_tokens=max(0, request.cached_tokens),
            matched=matched,
            message=message,
            versions=[(v, start, min(end, count)) for v, start, end in request.versions if start < count],
            error=None if error is None else error.__name__,
        )

    def _end_non_finite(self, step: Step, result: StepResult) -> list[Finished]:
        """End the requests whose logits for an output token or a prompt token were not finite.

        The KV that such a request computed is not shared any further, nor is the KV that it found in the
        prefix cache: the request that computed that KV may have ended before it sampled.
        """
        non_finite = {
            request: f"output token {request.num_outputs + 1}"
            for request, token in zip(step.sampling, result.tokens, strict=True)
            if token == NON_FINITE
        } | {
            request: "a prompt token"
            for request, count in step.prompt_logprobs
            if any(isnan(entry.logprob) for entry in result.prompt_logprobs[request.slot][:count])
        }
        finished = []
        for request, where in non_finite.items():
            if request.phase is RequestPhase.FINISHED:
                continue
            assert request.node is not None
            self.resources.prefix.hide(request.node)
            self.totals.non_finite_logits += 1
            text = (
                f"the model's logits for {where} of request {request.rid} are not finite (NaN or infinite), "
                "so there is no token to give. The weights, or the dtype they run in, do not suit this "
                "prompt: see the server's log"
            )
            finished.append(self._end(request, "error", message=text, error=NonFiniteLogitsError))
        return finished

    def retract_all(self) -> int:
        """Retract every running request and free its KV; returns their number. Nothing may be in flight."""
        started = [(request, request.node) for request in self.running.values()]
        for request, _ in started:
            self._retract(request)
        for _, node in started:
            assert node is not None
            self.resources.allocator.release(self.resources.prefix.discard(node))
        return len(started)

    def _retract(self, request: Request) -> None:
        """Put a request back into the queue with its tokens but without KV. Nothing may be in flight."""
        assert not self.in_flight
        del self.running[request.rid]
        self._release(request)
        request.forget_kv()
        request.num_retractions += 1
        request.enter(RequestPhase.WAITING)
        self.waiting.push(request)

    def _release(self, request: Request) -> None:
        self._swaps = [swap for swap in self._swaps if swap[0] is not request]
        self._free_later(slot=request.slot, pages=request.own_pages, node=request.node)

    def _free_later(self, *, slot: int | None = None, pages: list[int], node: Node | None = None) -> None:
        self.resources.release(self._step, slot=slot, pages=pages, node=node)
        self._settle()

    def _settle(self) -> None:
        self.resources.settle(self.in_flight[0].number if self.in_flight else self._step + 1)

    # --- planning ---

    @property
    def has_work(self) -> bool:
        """Whether a step could be planned now, or after the step in flight."""
        if self.control.admits:
            return bool(self.running or self.waiting)
        return self.control.runs and self.has_started_requests

    @property
    def has_started_requests(self) -> bool:
        """Whether a request runs, or waits because it was retracted."""
        return bool(self.running) or any(request.num_retractions for request in self.waiting)

    def plan(self) -> StepPlan | None:
        """Decide the next step; None if nothing can run, or not before the step in flight is applied."""
        assert len(self.in_flight) <= 1, "apply the oldest step before planning another"
        if not self.control.runs:
            return None
        decoding = [r for r in self.running.values() if r.wants_decode]
        needy = [r for r in decoding if r.launched == r.capacity]
        preempted = False
        if len(needy) > self.resources.num_available:
            if self.in_flight:  # a request may be about to end: no retraction for a token that may be dropped
                return None
            self._preempt(needy)
            preempted = True
            decoding = [r for r in decoding if r.phase is RequestPhase.DECODE]
            needy = [r for r in needy if r.phase is RequestPhase.DECODE]
        self._step += 1
        step = Step(self._step, self.weight_version)
        self.in_flight.append(step)
        swaps, self._swaps = self._swaps, []  # what this step's own insertions swap goes into the next plan
        step.pages += [(request.slot, first, pages) for request, first, pages in swaps]
        for request, page in zip(needy, self.resources.take_pages(len(needy)), strict=True):
            step.pages.append((request.slot, len(request.pages), [page]))
            request.pages.append(page)
            request.capacity += self.limits.page_size
        step.decode(decoding)
        self._plan_prefill(step, admit=not preempted)
        if not step.slots:
            self.in_flight.pop()
            self._step -= 1
            self._swaps = swaps
            return None
        self.totals.num_steps += 1
        self.num_decode_steps += step.num_decode > 0
        self.new_token_ratio.on_step()
        return step.plan()

    def _plan_prefill(self, step: Step, *, admit: bool) -> None:
        budget = self.limits.chunked_prefill_size
        for request in self.running.values():
            if request.phase is RequestPhase.PREFILL and budget > 0:
                budget -= self._prefill(request, step, budget)
        while admit and budget > 0 and self.resources.free_slots:
            admitted = self._next_to_admit()
            if admitted is None or not self._admit(admitted, step):
                break
            budget -= self._prefill(admitted, step, budget)

    def _next_to_admit(self) -> Request | None:
        """The head of the queue; during a pause of mode "wait", the first retracted request."""
        if self.control.admits:
            return self.waiting.head if self.waiting else None
        return next((request for request in self.waiting if request.num_retractions), None)

    def _prefill(self, request: Request, step: Step, budget: int) -> int:
        """Add a chunk to the step, and share its full pages at once; returns its length.

        Steps run in launch order, and each layer stores all KV of a step before it reads any. Later requests
        of the same step can therefore read these pages, so equal prompts sent together are computed once.
        """
        count = step.prefill(request, budget)
        self._insert_pages(request, request.launched)
        return count

    def _preempt(self, needy: Iterable[Request]) -> None:
        """Retract running requests until each request of ``needy`` that still runs can have a page."""
        needy = set(needy)
        while len(needy) > self.resources.num_available:
            assert len(self.running) > 1, "one request alone always fits: max_seq_len is at most the pool"
            victim = choose_victim(self.running.values())
            self._retract(victim)
            needy.discard(victim)
            self.totals.num_preemptions += 1
            self.new_token_ratio.on_preemption()

    def _admit(self, request: Request, step: Step) -> bool:
        """Give a request a slot and pages for all its known tokens; False if the reserve would not stay free.

        The reserve need not stay free if nothing else holds pages.
        """
        size = self.limits.page_size
        node = self._match(request)
        self.resources.prefix.lock(node)
        shared = self.resources.prefix.pages(node)
        needed = -(-len(request.tokens) // size) - len(shared)
        alone = not self.running and not self.resources.pending_free
        if needed + (0 if alone else self._reserve(request)) > self.resources.num_available:
            self.resources.prefix.unlock(node)
            return False
        self.waiting.remove(request)
        request.enter(RequestPhase.PREFILL)
        self.running[request.rid] = request
        request.slot = self.resources.free_slots.pop()
        request.node, request.num_inserted = node, len(shared)
        request.kv_epoch = self.kv_epoch
        request.pages = shared + self.resources.take_pages(needed)
        request.capacity = len(request.pages) * size
        request.launched = len(shared) * size
        if request.cached_tokens < 0:
            request.cached_tokens = request.launched
        self.totals.prompt_tokens += len(request.tokens)
        self.totals.cached_tokens += request.launched
        step.new_slots.append(
            NewSlot(request.slot, pack_ids(request.tokens), request.prompt_len, request.params)
        )
        step.pages.append((request.slot, 0, list(request.pages)))
        return True

    def _match(self, request: Request) -> Node:
        if not self.limits.prefix_cache:
            return self.resources.prefix.root(self.kv_epoch)
        usable = len(request.tokens) - 1  # the last token is always computed, because its logits are needed
        if request.owes_prompt_logprobs:
            usable = min(usable, max(0, request.prompt_logprobs_next - 1))
        return self.resources.prefix.match(self.kv_epoch, request.tokens, usable)

    def _reserve(self, newcomer: Request) -> int:
        """Pages that the running requests and the newcomer are expected to need for their output tokens."""
        tokens = expected_tokens(self.running.values()) + expected_tokens([newcomer])
        return int(tokens * self.new_token_ratio.value) // self.limits.page_size

    # --- results ---

    def apply(self, result: StepResult) -> SchedulerOutput:
        """Turn the oldest step's result into tokens and ends; the tokens of ended requests are dropped."""
        step = self.in_flight.popleft()
        assert step.number == result.step and len(step.sampling) == len(result.tokens)
        page_size = self.limits.page_size
        rids: list[str] = []
        tokens: list[int] = []
        finished: list[Finished] = []
        logprobs: dict[str, TokenLogprob] = {}
        if step.prompt_logprobs or NON_FINITE in result.tokens:
            finished += self._end_non_finite(step, result)
        prompt_logprobs = {
            request.rid: result.prompt_logprobs[request.slot][:count]
            for request, count in step.prompt_logprobs
            if request.phase is not RequestPhase.FINISHED
        }
        for index, (request, token) in enumerate(zip(step.sampling, result.tokens, strict=True)):
            if request.phase is RequestPhase.FINISHED:
                continue
            request.add_token(token, step.version)
            rids.append(request.rid)
            tokens.append(token)
            if result.logprobs is not None and (entry := result.logprobs[index]) is not None:
                logprobs[request.rid] = entry
            num_outputs = len(request.tokens) - request.prompt_len
            if token in request.stop_ids and num_outputs >= request.params.min_new_tokens:
                finished.append(self._end(request, "stop", matched=token))
            elif num_outputs >= request.max_new_tokens:
                finished.append(self._end(request, "length"))
            elif len(request.tokens) > (request.num_inserted + 1) * page_size:
                self._insert_pages(request, len(request.tokens) - 1)
        self._settle()
        totals = self.totals
        totals.output_tokens += len(tokens)
        totals.padded_tokens += result.padded_tokens
        if result.eager is None:
            totals.graph_hits += 1
        else:
            totals.eager_steps[result.eager] = totals.eager_steps.get(result.eager, 0) + 1
        return self.output(
            rids=rids,
            tokens=tokens,
            finished=finished,
            step_seconds=result.seconds,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _insert_pages(self, request: Request, computed: int) -> None:
        """Insert the full pages among the first ``computed`` positions into the prefix cache.

        If the cache already has a page with the same tokens, the request uses that one and frees its own.
        """
        if not self.limits.prefix_cache or request.kv_epoch != self.kv_epoch:
            return  # all pages of a cached path have the KV of one epoch
        size, first = self.limits.page_size, request.num_inserted
        node, pages, given_back = request.node, request.pages, list[int]()
        assert node is not None
        for index in range(first, computed // size):
            node, inserted = self.resources.prefix.extend(
                node, tuple(request.tokens[index * size : (index + 1) * size]), pages[index]
            )
            if not inserted:
                given_back.append(pages[index])
                pages[index] = node.page
            request.num_inserted += 1
        request.node = node
        if given_back:  # duplicates come first: a page that is new to the cache has no children
            self._swaps.append((request, first, pages[first : first + len(given_back)]))
            self._free_later(pages=given_back)

    def output(self, **columns: Any) -> SchedulerOutput:
        """Returns a message to the frontend with the present counters; ``columns`` are its other fields."""
        totals = self.totals
        totals.paused = self.control.client_mode
        totals.is_paused = self.control.client_state is PauseState.PAUSED
        totals.num_running, totals.num_waiting = len(self.running), len(self.waiting)
        totals.num_accepted = self._arrivals
        totals.used_pages = self.limits.num_pages - self.resources.allocator.num_free
        totals.cached_pages = self.resources.prefix.num_pages
        return SchedulerOutput(**({"rids": [], "tokens": [], "finished": []} | columns), counters=totals)

    def forget_cache(self) -> int:
        """Empty the prefix cache and reset the measures; returns the number of tokens that were cached.

        No step may be in flight and no request may own KV.
        """
        assert not self.in_flight and not self.running
        prefix = self.resources.prefix
        count = prefix.num_pages
        self.resources.allocator.release(prefix.evict(count))
        self.new_token_ratio = NewTokenRatio()
        self.num_decode_steps = 0
        return count * self.limits.page_size

    def set_weight_version(self, version: str) -> None:
        """Note that new weights are served. Requests keep the KV they have, but it is not shared any more."""
        assert not self.in_flight, "weights change between steps"
        self.weight_version = version
        self.kv_epoch += 1

    def rename_weights(self, version: str) -> None:
        """Give the served weights another name; cached KV stays valid."""
        self.weight_version = version

    def check_invariants(self) -> list[str]:
        """Returns one sentence per broken invariant; see :func:`segue.scheduler.invariants.find_problems`."""
        return find_problems(self)


def _rejected(message: AddRequest, kind: type[Exception], text: str) -> Rejected:
    return Rejected(message.rid, kind.__name__, text)
