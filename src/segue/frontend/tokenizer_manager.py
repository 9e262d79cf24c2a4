"""Connects clients with the scheduler: prompts become tokens, and output tokens become text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

from msgspec import convert, structs

from segue import errors
from segue.errors import (
    ContextLengthError,
    DrainingError,
    EngineDeadError,
    EngineHungError,
    InvalidRequestError,
    PoisonedError,
    SegueError,
)
from segue.frontend.admission import Admission
from segue.frontend.detokenizer import TokenTable
from segue.frontend.request import GenerateRequest, RequestState
from segue.frontend.sampling_options import Prepared, RequestLimits
from segue.frontend.stats import Stats
from segue.frontend.stream import RequestStream
from segue.frontend.text_bound import max_chars_per_token
from segue.frontend.thread_pool import ThreadPool, turn
from segue.frontend.tokenize import NO_TOKENIZER, Encoder, PendingCall, prepare_all
from segue.frontend.tokenizer import Tokenizer
from segue.messages.control import (
    Continue,
    Continued,
    Counters,
    Flush,
    Flushed,
    FlushResult,
    FrontendMessage,
    GetState,
    Pause,
    Paused,
    PauseMode,
    PauseResult,
    Ready,
    SchedulerMessage,
    SchedulerOutput,
    State,
)
from segue.messages.requests import (
    BEFORE_PREFILL,
    FIRST_WEIGHT_VERSION,
    Abort,
    AddRequest,
    Finish,
    Finished,
    Rejected,
    SamplingParams,
    pack_ids,
)
from segue.messages.weight_operations import WeightOperation
from segue.messages.weight_update import WeightAnswer, WeightCall, WeightNotice, WithdrawCall

Answer = TypeVar("Answer", State, Paused, Continued, Flushed, WeightAnswer)

# The largest conversation that is rendered on the event loop. Larger ones are rendered in a thread.
INLINE_MESSAGES = 64
INLINE_CHARS = 1 << 16


class TokenizerManager:
    """Holds one state per request. It lives on one event loop; :mod:`segue.launch.runtime` feeds it."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        ready: Ready,
        send: Callable[[FrontendMessage], None],
        eos_ids: Collection[int] = (),
        *,
        max_queued_requests: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.ready = ready
        self.stats = Stats(counters=Counters())
        self.weights = WeightNotice(version=FIRST_WEIGHT_VERSION)
        if tokenizer is None:
            self.table = TokenTable([b""] * ready.vocab_size)
        else:
            self.table = TokenTable.of(tokenizer.backend, tokenizer.special_ids, ready.vocab_size)
            eos_ids = {*eos_ids, *tokenizer.eos_ids}
        # A small test model may have the tokenizer of a real one. Ids without a logit cannot end a request.
        eos_ids = {token for token in eos_ids if token < ready.vocab_size}
        self.limits = RequestLimits(
            max_seq_len=ready.limits.max_seq_len, vocab_size=ready.vocab_size, eos_ids=eos_ids
        )
        self.thread_pool = ThreadPool()
        self._chars_per_token = (
            None if tokenizer is None else max_chars_per_token(tokenizer.backend, self.table.tokens)
        )
        self._send = send
        self._admission = Admission(max_queued_requests, ready.limits.max_running_requests)
        self._states: dict[str, RequestState] = {}
        self._arriving: dict[str, PendingCall] = {}  # rid -> its call, until the request has a state
        self._batches: dict[str, set[str]] = {}  # batch id -> rids of its requests in flight
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0
        self._dead: SegueError | None = None
        self._hung: str | None = None  # the reason
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    # --- clients ---

    async def submit(self, request: GenerateRequest) -> RequestStream:
        """Check one request and send it; see :meth:`submit_batch`."""
        return (await self.submit_batch([request]))[0]

    async def submit_batch(
        self, requests: Sequence[GenerateRequest], batch_id: str | None = None
    ) -> list[RequestStream]:
        """Check requests, and send all of them or none. Aborting ``batch_id`` aborts each of them.

        Raises:
            InvalidRequestError: a value breaks its rule, or a rid is in flight.
            ContextLengthError: a prompt does not fit the context.
            OverloadedError: more requests would wait than allowed.
            EngineDeadError: the engine has ended.
            EngineHungError: the engine does not answer.
            DrainingError: the server is shutting down.
            PoisonedError: a commit of weights failed half-way.
        """
        created = time.monotonic()
        self._check_rids(requests, batch_id)
        self._admission.check(len(requests), len(self._arriving), self.stats.counters)
        arrival = PendingCall(len(requests))
        rids = [request.rid for request in requests]
        self._arriving |= dict.fromkeys(rids, arrival)
        if batch_id is not None:
            self._batches[batch_id] = set(rids)
        self._idle.clear()
        begun: list[RequestState] = []
        try:
            options = await prepare_all(requests, self.limits, self.thread_pool)
            prompts = await arrival.tokenize(requests, self._encoder)
            added: list[tuple[RequestState, AddRequest]] = []
            for number, parts in enumerate(zip(requests, prompts, options, strict=True)):
                added.append(self._make_state(*parts, batch_id, created, arrival))
                await turn(number)
            for number, (state, message) in enumerate(added):
                if self._dead is not None:
                    raise self._dead
                self._send_request(state, message, arrival)
                begun.append(state)
                await turn(number)
        except BaseException:
            if batch_id is not None:
                self._batches.pop(batch_id, None)
            for state in begun:
                state.batch_id = None
                self.discard(state)
            raise
        finally:
            for rid in rids:
                if self._arriving.get(rid) is arrival:  # else it was sent, and its rid may be in use again
                    del self._arriving[rid]
            self._update_idle()
        return [RequestStream(state, self.discard) for state in begun]

    @property
    def _encoder(self) -> Encoder:
        return Encoder(self.tokenizer, self.limits, self._chars_per_token, self.thread_pool)

    def _make_state(
        self,
        request: GenerateRequest,
        ids: Sequence[int],
        prepared: Prepared,
        batch_id: str | None,
        created: float,
        arrival: PendingCall,
    ) -> tuple[RequestState, AddRequest]:
        """Make a request's state, and the message that adds it to the scheduler."""
        if request.rid in arrival.aborted:
            params = SamplingParams(max_new_tokens=0)
        else:
            params = prepared.params(len(ids))
        state = RequestState(request, ids, params, self.table, created)
        state.batch_id = batch_id
        message = AddRequest(rid=request.rid, prompt=pack_ids(ids), params=params, priority=request.priority)
        return state, message

    def _send_request(self, state: RequestState, message: AddRequest, arrival: PendingCall) -> None:
        """Send a request, or end it if it was aborted before."""
        del self._arriving[state.rid]
        self._states[state.rid] = state
        if state.rid not in arrival.aborted:
            try:
                self._send(message)
            except BaseException:
                del self._states[state.rid]
                raise
            self._admission.sent()
            return
        reason = arrival.aborted[state.rid]
        end = Finished(
            rid=state.rid,
            reason="abort",
            num_tokens=0,
            prompt_tokens=len(state.prompt_ids),
            cached_tokens=0,
            message=BEFORE_PREFILL if reason is None else reason,
        )
        self._finish(end, time.monotonic())

    def abort(self, rid: str = "", *, abort_all: bool = False, message: str | None = None) -> None:
        """End one request, a batch, or all; readers get the output so far. An unknown rid has no effect."""
        if self._dead is not None:
            return
        if abort_all:
            self._abort_arriving(self._arriving, message)
            self._send(Abort(abort_all=True, message=message))
            return
        rids = self._batches.get(rid, {rid})
        self._abort_arriving(rids, message)
        for each in rids:
            if each in self._states:
                self._send(Abort(rid=each, message=message))

    def _abort_arriving(self, rids: Iterable[str], message: str | None) -> int:
        """Abort requests that are not sent yet. Return how many were not aborted before."""
        arriving = [(rid, self._arriving[rid]) for rid in rids if rid in self._arriving]
        return sum(arrival.abort(rid, message) for rid, arrival in arriving)

    def discard(self, state: RequestState) -> None:
        """Abort a request whose reader has left, unless it has ended."""
        if state.end is None and state.error is None and not state.discarded:
            state.discarded = True
            self.abort(state.rid)

    async def pause_generation(self, mode: PauseMode, ttl_s: float | None = None) -> PauseResult:
        """Stop generation, and return once nothing runs. After ``ttl_s`` seconds it continues by itself."""
        arriving = self._abort_arriving(self._arriving, None) if mode == "abort" else 0
        sent = time.monotonic()
        answer = await self._ask(lambda call: Pause(call, mode, ttl_s, sent), Paused)
        result = convert(answer, PauseResult, from_attributes=True)
        return structs.replace(result, num_aborted=result.num_aborted + arriving)

    async def continue_generation(self) -> None:
        """Continue generation. No effect if it is not paused."""
        await self._ask(Continue, Continued)

    async def flush_cache(self, timeout_s: float = 0.0) -> FlushResult:
        """Drop all cached KV, unless a request still holds KV after ``timeout_s`` seconds."""
        answer = await self._ask(lambda call: Flush(call, timeout_s), Flushed)
        return convert(answer, FlushResult, from_attributes=True)

    async def ask_weights(
        self, operation: WeightOperation, roots: list[str] | None = None, from_hub: bool = True
    ) -> WeightAnswer:
        """Have an operation on the weights performed; :class:`WeightCall` describes the arguments."""
        return await self._ask(lambda call: WeightCall(call, operation, roots, from_hub), WeightAnswer)

    @property
    def weight_version(self) -> str:
        """The version of the served weights."""
        return self.weights.version

    async def get_state(self, *, check: bool = False) -> State:
        """Return the scheduler's state; with ``check`` also the violated invariants."""
        return await self._ask(lambda call: GetState(call, check), State)

    async def _ask(self, message: Callable[[int], FrontendMessage], kind: type[Answer]) -> Answer:
        """Send the message for a new call number, and wait for the answer with that number.

        Raises:
            EngineDeadError: the engine has ended.
            EngineHungError: the engine does not answer. It may still carry out the call when it recovers.
        """
        if self._dead is not None:
            raise self._dead
        if self._hung is not None:
            raise EngineHungError(self._hung)
        self._num_calls += 1
        call = self._num_calls
        self._calls[call] = asyncio.get_running_loop().create_future()
        try:
            self._send(message(call))
            answer = await self._calls[call]
        except asyncio.CancelledError:
            if kind is WeightAnswer and self._dead is None:
                self._send(WithdrawCall(call))
            raise
        finally:
            del self._calls[call]
        assert isinstance(answer, kind)
        return answer

    @property
    def num_requests(self) -> int:
        """The number of requests in flight."""
        return len(self._states) + len(self._arriving)

    async def wait_idle(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()

    async def render(self, messages: list[dict[str, Any]]) -> str:
        """Return the prompt that the model's chat template makes of messages.

        Raises:
            InvalidRequestError: the model has no chat template, or the template rejects the messages.
            ContextLengthError: the messages cannot fit the context, whatever the template makes of them.
        """
        if self.tokenizer is None:
            raise InvalidRequestError(NO_TOKENIZER, param="messages")
        max_len = self.limits.max_seq_len
        if len(messages) >= max_len:
            text = f"messages has {len(messages)} messages, but this model's context has {max_len} tokens"
            raise ContextLengthError(
                f"{text}; each message takes at least one token: send fewer messages", param="messages"
            )
        num_chars = sum(len(message["content"]) for message in messages)
        self._encoder.check_num_chars(num_chars, "messages")
        if len(messages) <= INLINE_MESSAGES and num_chars <= INLINE_CHARS:
            return self.tokenizer.apply_chat_template(messages)
        tokenizer = self.tokenizer
        return await self.thread_pool.run(lambda: tokenizer.apply_chat_template(messages))

    @property
    def trouble(self) -> SegueError | None:
        """Why no request can be served now; None: requests can be served."""
        if self._dead is not None:
            return self._dead
        if self._draining:
            return DrainingError("the server is shutting down; send the request to another one")
        if self._hung is not None:
            return EngineHungError(self._hung)
        if self.weights.poisoned is not None:
            why = self.weights.poisoned
            return PoisonedError(
                f"the weights are poisoned ({why}); update all of them, or restart the engine"
            )
        return None

    def drain(self) -> None:
        """Refuse new requests from now on. Requests in flight go on."""
        self._draining = True

    @property
    def is_hung(self) -> bool:
        """Whether the engine counts as hung."""
        return self._hung is not None

    def hang(self, reason: str) -> None:
        """Mark the engine as hung: new requests and all calls fail, and requests in flight wait."""
        self._hung = reason
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineHungError(reason))

    def recover(self) -> None:
        """Mark the engine as answering again."""
        self._hung = None

    def _check_rids(self, requests: Sequence[GenerateRequest], batch_id: str | None) -> None:
        if (trouble := self.trouble) is not None:
            raise trouble
        seen: set[str] = set()
        for rid in (request.rid for request in requests):
            if rid in self._states or rid in self._arriving or rid in self._batches or rid in seen:
                raise InvalidRequestError(
                    f"rid={rid!r} is in flight; use another rid, or wait for its reply", param="rid"
                )
            seen.add(rid)
        if batch_id in self._batches or batch_id in self._states or batch_id in self._arriving:
            raise InvalidRequestError(f"rid={batch_id!r} is in flight; use another rid", param="rid")

    # --- the scheduler ---

    def receive(self, message: SchedulerMessage) -> None:
        """Take a message from the running scheduler."""
        match message:
            case SchedulerOutput():
                self._on_step(message)
            case Rejected():
                self._admission.rejected()
                state = self._states.pop(message.rid, None)
                if state is not None:
                    state.fail(error_of(message.kind, message.message))
                    self._forget(state)
            case WeightNotice():
                self.weights = message
            case State() | Paused() | Continued() | Flushed() | WeightAnswer():
                future = self._calls.get(message.call)
                if future is not None and not future.done():
                    future.set_result(message)
            case _:
                raise TypeError(f"unexpected {type(message).__name__} from a running scheduler")

    def die(self, error: SegueError) -> None:
        """Mark the engine as ended: all requests and calls, now and later, end with ``error``."""
        if self._dead is not None:
            return
        self._dead = error
        self.thread_pool.close(error)
        self.stats.finished["error"] += len(self._states)
        for state in self._states.values():
            state.fail(error)
        self._states.clear()
        self._batches.clear()
        for arrival in self._arriving.values():
            arrival.end()
        self._idle.set()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)

    def _on_step(self, output: SchedulerOutput) -> None:
        now = time.monotonic()
        stats, states, logprobs = self.stats, self._states, output.logprobs
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
        state = self._states.pop(finished.rid, None)
        if state is None:
            return
        if finished.error is not None:
            state.fail(error_of(finished.error, finished.message or ""))
            self.stats.finished["error"] += 1
        else:
            self.stats.finished[state.finish(finished).reason] += 1
        self.stats.request.observe(now - state.created)
        self._forget(state)

    def _forget(self, state: RequestState) -> None:
        if state.batch_id is not None:
            rids = self._batches[state.batch_id]
            rids.remove(state.rid)
            if not rids:
                del self._batches[state.batch_id]
        self._update_idle()

    def _update_idle(self) -> None:
        if not self.num_requests:
            self._idle.set()


def error_of(kind: str, message: str) -> SegueError:
    """Return the error whose class another process has named."""
    cls = getattr(errors, kind, None)
    if isinstance(cls, type) and issubclass(cls, SegueError):
        return cls(message)
    return EngineDeadError(f"{kind}: {message}")
