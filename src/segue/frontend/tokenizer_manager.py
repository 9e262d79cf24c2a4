"""Between clients and the scheduler: text to tokens on the way in, tokens to text on the way out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from segue import errors
from segue.errors import EngineDeadError, InvalidRequestError, SegueError
from segue.frontend.detokenizer import TokenTable
from segue.frontend.request import GenerateRequest, RequestState
from segue.frontend.sampling import Vocabulary, build_params, check_prompt_len, check_token_ids
from segue.frontend.stats import Stats
from segue.frontend.stream import Stream
from segue.frontend.tokenizer import Tokenizer
from segue.protocol.messages import (
    Abort,
    AddRequest,
    Counters,
    Finish,
    Finished,
    FrontendMessage,
    GetState,
    Ready,
    Rejected,
    SchedulerMessage,
    State,
    StepOutput,
    pack_ids,
)

INLINE_CHARS = 4096  # of a call's texts; more are tokenized in a thread
INLINE_MESSAGES = 64  # of a conversation; longer ones are rendered in a thread
PROBE_CHARS_PER_TOKEN = 16  # texts longer than this a token of context are judged by their beginning
PROBE_SLACK = 256  # tokens by which the beginning of a text may exceed the whole
FIRST_VERSION = "0"
NO_TOKENIZER = "this model has no tokenizer; give the prompt as token ids"


class TokenizerManager:
    """One state a request. Lives on one event loop; :mod:`segue.frontend.runtime` feeds it."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        ready: Ready,
        send: Callable[[FrontendMessage], None],
        eos_ids: Collection[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.ready = ready
        self.stats = Stats(counters=Counters())
        self.weight_version = FIRST_VERSION
        if tokenizer is None:
            self.table = TokenTable([b""] * ready.vocab_size)
        else:
            self.table = TokenTable.of(tokenizer.backend, tokenizer.special_ids, ready.vocab_size)
            eos_ids = {*eos_ids, *tokenizer.eos_ids}
        # A small test model may come with a real tokenizer: ids that it has no logit for cannot end anything.
        eos_ids = {token for token in eos_ids if token < ready.vocab_size}
        self.limits = Vocabulary(max_seq_len=ready.max_seq_len, vocab_size=ready.vocab_size, eos_ids=eos_ids)
        self._send = send
        self._states: dict[str, RequestState] = {}
        self._batches: dict[str, set[str]] = {}  # a batch's id -> those of its requests in flight
        self._calls: dict[int, asyncio.Future[State]] = {}
        self._num_calls = 0
        self._dead: SegueError | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    # --- clients ---

    async def submit(self, request: GenerateRequest) -> Stream:
        """Check one request and send it; see :meth:`submit_batch`."""
        return (await self.submit_batch([request]))[0]

    async def submit_batch(
        self, requests: Sequence[GenerateRequest], batch_id: str | None = None
    ) -> list[Stream]:
        """Check requests and send all of them, or none. Aborting ``batch_id`` aborts each.

        Raises:
            InvalidRequestError: a value outside its rule, or a rid that is in flight.
            ContextLengthError: a prompt that does not fit.
            EngineDeadError: there is no engine any more.
        """
        created = time.monotonic()
        self._check_rids(requests, batch_id)
        if sum(len(each.prompt) for each in requests if isinstance(each.prompt, str)) <= INLINE_CHARS:
            prompts = [self._tokenize(request) for request in requests]
        else:
            prompts = await asyncio.to_thread(lambda: [self._tokenize(request) for request in requests])
        params = [
            build_params(request.options, len(ids), self.limits, request.names)
            for request, ids in zip(requests, prompts, strict=True)
        ]
        self._check_rids(requests, batch_id)  # tokenizing may have taken a while
        streams: list[Stream] = []
        for request, ids, param in zip(requests, prompts, params, strict=True):
            state = RequestState(request, ids, param, self.table, created)
            self._send(
                AddRequest(rid=request.rid, prompt=pack_ids(ids), params=param, priority=request.priority)
            )
            state.batch_id = batch_id
            self._states[request.rid] = state
            streams.append(Stream(state, self.discard))
        if batch_id is not None:
            self._batches[batch_id] = {request.rid for request in requests}
        self._idle.clear()
        return streams

    def abort(self, rid: str = "", *, abort_all: bool = False, message: str | None = None) -> None:
        """End one request, a batch's, or all; readers get what there is. An unknown rid does nothing."""
        if self._dead is not None:
            return
        if abort_all:
            self._send(Abort(abort_all=True, message=message))
            return
        for each in self._batches.get(rid, {rid}):
            if each in self._states:
                self._send(Abort(rid=each, message=message))

    def discard(self, state: RequestState) -> None:
        """The reader has gone: abort the request unless it has ended."""
        if state.end is None and state.error is None and not state.discarded:
            state.discarded = True
            self.abort(state.rid)

    async def get_state(self, *, check: bool = False) -> State:
        """The scheduler's state; with ``check`` also the invariants that are broken."""
        if self._dead is not None:
            raise self._dead
        self._num_calls += 1
        call = self._num_calls
        future: asyncio.Future[State] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        try:
            self._send(GetState(call, check))
            return await future
        finally:
            del self._calls[call]

    @property
    def num_requests(self) -> int:
        """Requests in flight."""
        return len(self._states)

    async def wait_idle(self) -> None:
        """Until nothing is in flight."""
        await self._idle.wait()

    async def render(self, messages: list[dict[str, Any]]) -> str:
        """The prompt that the model's chat template makes of messages.

        Raises:
            InvalidRequestError: there is no template, or it refuses them.
        """
        if self.tokenizer is None:
            raise InvalidRequestError(NO_TOKENIZER, param="messages")
        if len(messages) <= INLINE_MESSAGES:
            return self.tokenizer.apply_chat_template(messages)
        return await asyncio.to_thread(self.tokenizer.apply_chat_template, messages)

    def _check_rids(self, requests: Sequence[GenerateRequest], batch_id: str | None) -> None:
        if self._dead is not None:
            raise self._dead
        seen: set[str] = set()
        for rid in (request.rid for request in requests):
            if rid in self._states or rid in self._batches or rid in seen:
                raise InvalidRequestError(
                    f"rid={rid!r} is in flight; use another, or wait for its reply", param="rid"
                )
            seen.add(rid)
        if batch_id is not None and (batch_id in self._batches or batch_id in self._states):
            raise InvalidRequestError(f"rid={batch_id!r} is in flight; use another", param="rid")

    def _tokenize(self, request: GenerateRequest) -> Sequence[int]:
        prompt = request.prompt
        if isinstance(prompt, str):
            prompt = self._encode(prompt, request)
        check_prompt_len(len(prompt), self.limits, request.param)
        check_token_ids(prompt, self.limits, request.param)
        return prompt

    def _encode(self, text: str, request: GenerateRequest) -> list[int]:
        """Tokenize; megabytes only if their beginning could fit the context."""
        if self.tokenizer is None:
            raise InvalidRequestError(NO_TOKENIZER, param=request.param)
        special = request.add_special_tokens
        size = PROBE_CHARS_PER_TOKEN * self.limits.max_seq_len
        if len(text) > size:
            count = len(self.tokenizer.encode(text[:size], add_special_tokens=special)) - PROBE_SLACK
            if count >= self.limits.max_seq_len:
                check_prompt_len(count, self.limits, request.param, at_least=True)
        return self.tokenizer.encode(text, add_special_tokens=special)

    # --- the scheduler ---

    def receive(self, message: SchedulerMessage) -> None:
        """Take a message of the running scheduler."""
        match message:
            case StepOutput():
                self._on_step(message)
            case Rejected():
                state = self._states.pop(message.rid, None)
                if state is not None:
                    state.fail(error_of(message.kind, message.message))
                    self._ended(state)
            case State():
                future = self._calls.get(message.call)
                if future is not None and not future.done():
                    future.set_result(message)
            case _:
                raise TypeError(f"unexpected {type(message).__name__} from a running scheduler")

    def die(self, error: SegueError) -> None:
        """The engine is gone: everything in flight ends with the error, and so does everything that comes."""
        if self._dead is not None:
            return
        self._dead = error
        self.stats.finished["error"] += len(self._states)
        for state in self._states.values():
            state.fail(error)
        self._states.clear()
        self._batches.clear()
        self._idle.set()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)

    def _on_step(self, output: StepOutput) -> None:
        now = time.monotonic()
        stats, states, logprobs = self.stats, self._states, output.logprobs
        stats.counters = output.counters
        if output.step_seconds > 0.0:
            stats.step.observe(output.step_seconds)
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
        end = state.finish(finished)
        if finished.versions:
            self.weight_version = finished.versions[-1][0]
        self.stats.finished[end.reason] += 1
        self.stats.request.observe(now - state.created)
        self._ended(state)

    def _ended(self, state: RequestState) -> None:
        if state.batch_id is not None:
            rids = self._batches[state.batch_id]
            rids.remove(state.rid)
            if not rids:
                del self._batches[state.batch_id]
        if not self._states:
            self._idle.set()


def error_of(kind: str, message: str) -> SegueError:
    """An error that another process named."""
    cls = getattr(errors, kind, None)
    if isinstance(cls, type) and issubclass(cls, SegueError):
        return cls(message)
    return EngineDeadError(f"{kind}: {message}")
