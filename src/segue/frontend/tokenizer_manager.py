"""Connects clients with the scheduler: prompts become tokens, and output tokens become text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from msgspec import structs

from segue.bootstrap_hosts import BootstrapHosts
from segue.errors import (
    InvalidRequestError,
    OverloadedError,
    PoisonedError,
    SegueError,
    WeightsReleasedError,
    error_of,
)
from segue.failover.life import Life
from segue.frontend.call_trace import CallTrace, EngineTracing
from segue.frontend.control_calls import ControlCalls
from segue.frontend.control_log import EngineLog
from segue.frontend.detokenizer import TokenTable, max_chars_per_token
from segue.frontend.grammars import GrammarChecks
from segue.frontend.handing_over import Handoffs, goes_on_elsewhere
from segue.frontend.life import Admission
from segue.frontend.request import GenerateRequest, Generation, RequestState
from segue.frontend.sampling_options import DEFAULT_MAX_LOGPROBS, RequestLimits
from segue.frontend.stats import Stats
from segue.frontend.thread_pool import ThreadPool, turn
from segue.frontend.tokenizer import PromptEncoder, Tokenizer
from segue.messages import control
from segue.messages.control import FrontendMessage, PauseMode, PauseResult
from segue.messages.guided import GuidedVocabulary
from segue.messages.memory import MemoryAnswer
from segue.messages.profile import ProfileAnswer
from segue.messages.requests import (
    BEFORE_PREFILL,
    FIRST_WEIGHT_VERSION,
    Abort,
    AddRequest,
    Finish,
    Finished,
    Handoff,
    Rejected,
    pack_ids,
)
from segue.messages.weight_update import WeightAnswer, WeightNotice

EARLIER_LEG_S = 5.0  # that an earlier leg of a request has to end, once it is aborted
EARLIER_LEG_POLL_S = 0.002  # between two looks whether it has


class TokenizerManager:
    """Holds one state per request. It lives on one event loop; :mod:`segue.launch.runtime` feeds it.

    A request is *arriving* from :meth:`submit` until its prompt is encoded. Then it is sent to the scheduler
    and has a state, until it ends. In both times it is in flight, and its rid is taken.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        ready: control.Ready,
        send: Callable[[FrontendMessage], None],
        eos_ids: Collection[int] = (),
        *,
        life: Life,
        log: EngineLog | None = None,
        tracing: EngineTracing | None = None,
        max_queued_requests: int,
        max_logprobs: int = DEFAULT_MAX_LOGPROBS,
        bootstrap_hosts: BootstrapHosts,
        bootstrap_port: int,
    ) -> None:
        """Take the limits from ``ready``, which the workers send when they can serve; ``send`` sends to them.

        Without a ``tokenizer`` prompts must be token ids, and every text is empty. ``eos_ids`` are those of
        the model's configuration, to which the tokenizer's are added. A request that names no
        ``bootstrap_port`` means the one given here. ``tracing`` makes spans; None: there are none.
        """
        self.ready = ready
        self.role = ready.role  # which work the engine takes
        self.control_address = ready.control_address  # where it hands KV over; None: nowhere
        self.stats = Stats()
        self.weights = WeightNotice(version=FIRST_WEIGHT_VERSION)
        chars_per_token = None
        if tokenizer is None:
            self.table = TokenTable([b""] * ready.vocab_size)
        else:
            self.table = TokenTable.of(tokenizer.backend, tokenizer.special_ids, ready.vocab_size)
            eos_ids = {*eos_ids, *tokenizer.eos_ids}
            chars_per_token = max_chars_per_token(tokenizer.backend, self.table.tokens)
        # A small test model may have the tokenizer of a real one. Ids without a logit cannot end a request.
        eos_ids = {token for token in eos_ids if token < ready.vocab_size}
        limits = RequestLimits(
            max_seq_len=ready.limits.max_seq_len,
            vocab_size=ready.vocab_size,
            eos_ids=eos_ids,
            max_logprobs=max_logprobs,
        )
        self.thread_pool = ThreadPool()
        checks = GrammarChecks(limits, self.thread_pool, has_tokenizer=tokenizer is not None)
        self.encoder = PromptEncoder(tokenizer, limits, chars_per_token, self.thread_pool, checks)
        self._has_sent_vocabulary = False
        self._handoffs = Handoffs(bootstrap_hosts, bootstrap_port)
        self._life = life
        self._send = send
        self.log = log or EngineLog()  # of what is done to the engine
        self.tracing = tracing
        self.calls = ControlCalls(send, life, self.log)
        self._admission = Admission(max_queued_requests, ready.limits.max_running_requests)
        self._states: dict[str, RequestState] = {}
        self._arriving: dict[str, Generation] = {}  # rid -> its call, until the request has a state
        self._batches: dict[str, set[str]] = {}  # batch id, or group -> rids of its requests in flight
        self._aliases: dict[str, set[str]] = {}  # alias -> rids of the requests in flight that share it
        self._idle = asyncio.Event()
        self._idle.set()

    # --- clients ---

    async def submit(
        self,
        requests: Sequence[GenerateRequest],
        batch_id: str | None = None,
        *,
        is_streamed: bool = False,
        is_canary: bool = False,
        alias: str = "",
        trace: CallTrace | None = None,
    ) -> Generation:
        """Check requests, and send all of them or none. Aborting ``batch_id`` aborts each of them.

        Aborting a ``group`` aborts those that have it, and aborting ``alias`` all that have it, also those of
        other calls. ``trace`` is told how each request ends.
        With ``is_canary`` they are taken also by an engine that is not active yet.
        With ``is_streamed`` it waits up to ``ACCEPT_S`` for a refusal of the scheduler, which is raised.

        Raises:
            InvalidRequestError: a value breaks its rule, or a rid is in flight.
            ContextLengthError: a prompt does not fit the context.
            OverloadedError: more requests would wait than allowed, or an earlier leg does not end.
            EngineDeadError: the engine has ended.
            EngineHungError: the engine does not answer.
            DrainingError: the server is shutting down.
            PoisonedError: a commit of weights failed half-way.
        """
        created = time.monotonic()
        await self._end_earlier_leg(requests)
        self._check_rids(requests, batch_id, is_canary)
        handoffs = [
            self._handoffs.of(request, role=self.role, first_role=self.ready.role) for request in requests
        ]
        self._admission.check(len(requests), len(self._arriving), self.stats.counters)
        generation = Generation(len(requests), self._abort_each, requests[0].leg if requests else "")
        rids = [request.rid for request in requests]
        self._arriving |= dict.fromkeys(rids, generation)
        for request in requests:
            for name in _batches_of(request, batch_id):
                self._batches.setdefault(name, set()).add(request.rid)
        if alias:
            self._aliases.setdefault(alias, set()).update(rids)
        self._idle.clear()
        if trace is not None:
            trace.num_left = len(requests)
        try:
            prompts = await self.encoder.encode_call(requests, generation)
            parts = zip(requests, prompts, handoffs, strict=True)
            for number, (request, (ids, params), handoff) in enumerate(parts):
                if self._life.error is not None:
                    raise self._life.error
                if not goes_on_elsewhere(params, len(ids)):
                    handoff = None
                is_shared = request.bootstrap is not None or request.handoff is not None
                if self.role == "prefill" and is_shared and handoff is None:  # nobody takes it over
                    params = structs.replace(params, max_new_tokens=min(1, params.max_new_tokens))
                state = RequestState(
                    request,
                    ids,
                    params,
                    self.table,
                    created,
                    generation.changed,
                    _batches_of(request, batch_id),
                    alias,
                    trace,
                )
                if request.outputs or request.output_end is not None:
                    state.prime(request.outputs, request.output_logprobs, request.output_end)
                if state.end is not None:  # the client has all of it
                    if trace is not None:
                        trace.ended(state, state.end, time.monotonic())
                    self._forget(state)
                else:
                    self._begin(request, state, generation, handoff)
                generation.states.append(state)
                await turn(number)
        except BaseException:
            for request in requests:
                for name in _batches_of(request, batch_id):
                    self._batches.pop(name, None)
            for state in generation.states:
                state.batches = ()  # else `_forget` would look for them
            known = {state.rid for state in generation.states}  # which `_forget` takes back
            self._drop_alias(alias, *(rid for rid in rids if rid not in known))
            generation.close()
            raise
        finally:
            for rid in rids:
                if self._arriving.get(rid) is generation:  # else it was sent: its rid may be in use again
                    del self._arriving[rid]
            self._update_idle()
        if is_streamed:
            try:
                await generation.accepted()
            except BaseException:
                generation.close()
                raise
        return generation

    def _begin(
        self, request: GenerateRequest, state: RequestState, generation: Generation, handoff: Handoff | None
    ) -> None:
        """Send a request, or end it if it was aborted before."""
        rid = request.rid
        del self._arriving[rid]
        self._states[rid] = state
        if rid in generation.aborted:
            reason = generation.aborted[rid]
            end = Finished(
                rid=rid,
                reason="abort",
                num_tokens=len(state.ids),
                prompt_tokens=len(state.prompt_ids),
                cached_tokens=0,
                message=BEFORE_PREFILL if reason is None else reason,
            )
            self._finish(end, time.monotonic())
            return
        message = AddRequest(
            rid=rid,
            prompt=pack_ids(state.prompt_ids),
            params=state.params,
            priority=request.priority,
            outputs=pack_ids(request.outputs),
            handoff=handoff,
            shares_kv=request.shares_kv,
            cache_salt=request.cache_salt,
        )
        try:
            if message.params.grammar is not None and not self._has_sent_vocabulary:
                self._send(self.vocabulary())
                self._has_sent_vocabulary = True
            self._send(message)
            if state.cut >= 0:  # the outputs complete a stop string already
                self._send(Finish(rid, state.cut))
        except BaseException:
            del self._states[rid]
            raise
        self._admission.num_sent += 1

    def vocabulary(self) -> GuidedVocabulary:
        """Return the vocabulary, with as many tokens as there are logits."""
        limits, table = self.encoder.limits, self.table
        return GuidedVocabulary(
            tokens=table.tokens[: limits.vocab_size],
            special_ids=sorted(token for token in table.special_ids if token < limits.vocab_size),
            eos_ids=sorted(limits.eos_ids),
        )

    def abort(self, rid: str = "", *, abort_all: bool = False, message: str | None = None) -> None:
        """End one request, a batch, all of an alias, or all; readers get the output so far.

        An unknown rid has no effect.
        """
        if not abort_all:
            if num_aborted := self.num_of([rid]):
                self.log.add("abort", f"abort of {rid!r}: {num_aborted} requests")
            self._abort_each(self._named([rid]), message)
        elif self._life.error is None:
            self.log.add("abort", f"abort of all requests: {self.num_requests}")
            self._abort_arriving(self._arriving, message)
            self._send(Abort(abort_all=True, message=message))

    def _abort_each(self, rids: Iterable[str], message: str | None = None) -> None:
        """End the requests with these ids, whatever else they name."""
        if self._life.error is not None:
            return
        self._abort_arriving(rids, message)
        for each in rids:
            if each in self._states:
                self._send(Abort(rid=each, message=message))

    def _abort_arriving(self, rids: Iterable[str], message: str | None) -> int:
        """Abort requests that are not sent yet; return how many were not aborted before."""
        arriving = [(rid, self._arriving[rid]) for rid in rids if rid in self._arriving]
        return sum(generation.abort(rid, message) for rid, generation in arriving)

    # --- the state of the engine ---

    async def pause_generation(self, mode: PauseMode, ttl_s: float | None = None) -> PauseResult:
        """Stop generation, and return once nothing runs. After ``ttl_s`` seconds it continues by itself."""
        arriving = self._abort_arriving(self._arriving, None) if mode == "abort" else 0
        result = await self.calls.pause(mode, ttl_s)
        return structs.replace(result, num_aborted=result.num_aborted + arriving)

    @property
    def num_requests(self) -> int:
        """The number of requests in flight."""
        return len(self._states) + len(self._arriving)

    def num_of(self, ids: Iterable[str]) -> int:
        """The number of requests in flight that ids mean, as :meth:`abort` takes them."""
        return sum(each in self._states or each in self._arriving for each in self._named(ids))

    def _named(self, ids: Iterable[str]) -> set[str]:
        """The rids that ids mean: those of a batch, those that share an alias, or a request's own."""
        found: set[str] = set()
        for each in ids:
            found |= self._batches.get(each, {each}) | self._aliases.get(each, set())
        return found

    async def wait_idle(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()

    @property
    def trouble(self) -> SegueError | None:
        """Why no request can be served now; None: requests can be served."""
        if (refusal := self._refusal) is not None:
            return refusal
        missing = self.weights.missing
        return None if missing is None else WeightsReleasedError(f"the weights are not there: {missing}")

    @property
    def _refusal(self) -> SegueError | None:
        """Why new requests are refused. While released weights are missing, requests only wait."""
        why = self.weights.poisoned
        if why is None or self._life.trouble is not None:
            return self._life.trouble
        return PoisonedError(f"the weights are poisoned ({why}); update all of them, or restart the engine")

    async def _end_earlier_leg(self, requests: Sequence[GenerateRequest]) -> None:
        """End what an earlier leg of the same client's request has left, and wait for its end.

        A router that sends a leg has closed the connection of the earlier one, but this engine may notice
        that later.

        Raises:
            OverloadedError: it does not end within ``EARLIER_LEG_S`` seconds.
        """
        deadline, aborted = time.monotonic() + EARLIER_LEG_S, set()
        while left := [
            request.rid for request in requests if request.leg and self._leg_of(request.rid) == request.leg
        ]:
            if time.monotonic() >= deadline:
                text = f"an earlier leg of request {left[0]!r} has not ended within {EARLIER_LEG_S:g} s"
                raise OverloadedError(f"{text}; send it to another engine, or later")
            self._abort_each([rid for rid in left if rid not in aborted])
            aborted.update(left)
            await asyncio.sleep(EARLIER_LEG_POLL_S)

    def _leg_of(self, rid: str) -> str:
        """Return the leg that a request in flight is part of; "": of none, or it is not in flight."""
        held = self._states.get(rid) or self._arriving.get(rid)
        return "" if held is None else held.leg

    def _check_rids(self, requests: Sequence[GenerateRequest], batch_id: str | None, is_canary: bool) -> None:
        """Raise an error if the engine cannot serve, or if an id is in flight or occurs twice.

        Requests and batches share one space of ids, because :meth:`abort` takes either.
        """
        if (refusal := self._life.silence if is_canary else self._refusal) is not None:
            raise refusal
        seen: set[str] = set()
        for rid in (request.rid for request in requests):
            if rid in self._states or rid in self._arriving or rid in self._batches or rid in seen:
                raise InvalidRequestError(
                    f"rid={rid!r} is in flight; use another rid, or wait for its reply", param="rid"
                )
            seen.add(rid)
        names = dict.fromkeys(name for request in requests for name in _batches_of(request, batch_id))
        for name in names:
            if name in self._batches or name in self._states or name in self._arriving or name in seen:
                raise InvalidRequestError(f"rid={name!r} is in flight; use another rid", param="rid")

    # --- the scheduler ---

    def receive(self, message: control.SchedulerMessage) -> None:
        """Take a message from the running scheduler."""
        match message:
            case control.SchedulerOutput():
                self._on_step(message)
            case Rejected():
                self._admission.num_rejected += 1
                state = self._states.pop(message.rid, None)
                if state is not None:
                    self._fail(state, error_of(message.kind, message.message))
                    self._forget(state)
            case WeightNotice():
                self.log.note_weights(self.weights, message)
                if self.tracing is not None:
                    self.tracing.note_weights(self.weights, message)
                self.weights = message
            case (
                control.State()
                | control.EngineLoad()
                | control.Paused()
                | control.Continued()
                | control.Flushed()
                | control.RoleSet()
                | MemoryAnswer()
                | ProfileAnswer()
                | WeightAnswer()
            ):
                if isinstance(message, control.RoleSet) and not message.error:
                    self.role, self.control_address = message.role, message.control_address
                self.calls.answer(message)
            case _:
                raise TypeError(f"unexpected {type(message).__name__} from a running scheduler")

    def die(self, error: SegueError) -> None:
        """End all requests and calls with an error: the engine is dead."""
        self.thread_pool.close(error)
        self.stats.finished["error"] += len(self._states)
        for state in self._states.values():
            self._fail(state, error)
        self._states.clear()
        self._batches.clear()
        self._aliases.clear()
        for generation in self._arriving.values():
            generation.stop_encoding()
        self._idle.set()
        self.calls.fail(error)

    def _on_step(self, output: control.SchedulerOutput) -> None:
        """Give the requests the tokens of a step, and end those that ended in it.

        Tokens of unknown requests are dropped: their ends have been handled before.
        """
        now = time.monotonic()
        stats, states, logprobs = self.stats, self._states, output.logprobs
        if output.counters.paused != stats.counters.paused:
            self.log.note_pause(output.counters.paused, now)
        stats.counters = output.counters
        if output.step_seconds > 0.0:
            stats.step.observe(output.step_seconds)
            stats.last_step_at = now
        for rid, entries in output.prompt_logprobs.items():
            if (state := states.get(rid)) is not None:
                state.prompt_logprobs += entries
        ends = {finished.rid: finished for finished in output.finished}
        for rid, token in zip(output.rids, output.tokens, strict=True):
            state = states.get(rid)
            if state is None:
                continue
            if state.first_token_at:
                stats.between_tokens.observe(now - state.last_token_at)
            else:
                state.first_token_at = now
                stats.first_token.observe(now - state.created)
                if output.counters.laps is not None:
                    of = "long" if rid in output.long else "short"
                    stats.first_token_of[of].observe(now - state.created)
                stats.prompt_tokens += len(state.prompt_ids)
            state.last_token_at = now
            end = ends.get(rid)
            is_stop = end is not None and end.matched == token
            if state.add(token, logprobs.get(rid), is_stop=is_stop) and end is None:
                self._send(Finish(rid, state.cut))
            if state.streaming:
                state.changed.set()
        for finished in output.finished:
            self._finish(finished, now)

    def _finish(self, finished: Finished, now: float) -> None:
        """End a request as the scheduler did, and count its end by reason."""
        state = self._states.pop(finished.rid, None)
        if state is None:
            return
        if finished.error is not None:
            state.fail(error_of(finished.error, finished.message or ""))
            self.stats.finished["error"] += 1
        else:
            if state.params.max_new_tokens == 0 and finished.reason == "length":  # no token counts its prompt
                self.stats.prompt_tokens += len(state.prompt_ids)
            self.stats.finished[state.finish(finished).reason] += 1
        self.stats.request.observe(now - state.created)
        self.stats.note_times(finished.times)
        if state.trace is not None:
            state.trace.ended(state, finished, now)
        self._forget(state)

    def _fail(self, state: RequestState, error: SegueError) -> None:
        """End a request with an error that no `Finished` tells of."""
        state.fail(error)
        if state.trace is not None:
            state.trace.fail(error)

    def _forget(self, state: RequestState) -> None:
        """Drop what is left of an ended request: its place in its batches, and under its alias."""
        for name in state.batches:
            rids = self._batches[name]
            rids.remove(state.rid)
            if not rids:
                del self._batches[name]
        self._drop_alias(state.alias, state.rid)
        self._update_idle()

    def _drop_alias(self, alias: str, *rids: str) -> None:
        """Let an alias name requests no more."""
        if (named := self._aliases.get(alias)) is not None:
            named.difference_update(rids)
            if not named:
                del self._aliases[alias]

    def _update_idle(self) -> None:
        if not self.num_requests:
            self._idle.set()


def _batches_of(request: GenerateRequest, batch_id: str | None) -> tuple[str, ...]:
    """Return the ids that abort a request with others of its call: those of the batch and of its group."""
    return tuple(dict.fromkeys(name for name in (batch_id, request.group) if name))
