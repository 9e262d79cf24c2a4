"""A request to the frontend, its state while it is in flight, its output, and the requests of one call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec import structs

from segue.errors import InvalidRequestError, SegueError
from segue.frontend.detokenizer import Detokenizer, StopMatcher, TokenTable
from segue.frontend.sampling_options import SamplingOptions
from segue.frontend.signal import Signal
from segue.frontend.thread_pool import turn
from segue.messages.requests import Finished, Handoff, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from segue.frontend.call_trace import CallTrace

MAX_PRIORITY = 1 << 31
LOWEST_LOGPROB = -9999.0  # instead of minus infinity, which JSON cannot write
ACCEPT_S = 0.5  # how long a streamed call waits for a refusal of the scheduler before its reply begins


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrap:
    """How a prefill engine and a decode engine find each other for one request, as SGLang names it."""

    host: str  # of the prefill engine
    port: int | None  # where it hands KV over; None: as this engine does, if it prefills
    room: int  # 63 bits that no other request has


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt, and the options for its continuation."""

    rid: str
    prompt: str | Sequence[int]
    options: SamplingOptions
    priority: int = 0
    add_special_tokens: bool = True  # to a text prompt; a rendered chat template contains its own
    param: str = "prompt"  # the client's field name of the prompt, for errors
    bootstrap: Bootstrap | None = None  # None: this engine does all of it, unless there is a handoff
    handoff: Handoff | None = None  # the part that this engine does, where a router has decided it
    leg: str = ""  # the id of the router's leg that it is part of; "": of none
    seed: int | None = None  # for options without a seed; None: a random one
    choice: int = 0  # its number among the choices of its prompt, which are neighbours in a call
    group: str = ""  # the id that aborts all choices of its prompt; "": there is one choice
    outputs: Sequence[int] = ()  # output tokens that the client has already; the request goes on behind them
    output_logprobs: Sequence[TokenLogprob] = ()  # one per output token, if they were requested
    output_end: Finished | None = None  # how the output ended; then nothing is left to generate
    is_accepted: bool = False  # whether another engine decides if its grammar is too slow
    shares_kv: bool = True  # whether it uses the prefix cache
    cache_salt: str = ""  # it shares KV with requests of the same salt only
    keeps_marks: bool = False  # whether its text has the marks of tool calls and reasoning, special or not


@dataclass(slots=True)
class Output:
    """The output of a request since the last :meth:`RequestState.take`."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]  # one per token id, if they were requested
    offsets: list[int]  # start of each token in the whole text, if logprobs were requested
    end: Finished | None

    def joined(self, more: Output) -> Output:
        """Return this output with the one behind it."""
        return Output(
            self.text + more.text,
            self.token_ids + more.token_ids,
            self.logprobs + more.logprobs,
            self.offsets + more.offsets,
            more.end,
        )


@dataclass(slots=True, eq=False)
class RequestState:
    """One request in flight: collects tokens, holds back text that may begin a stop string, and ends once.

    :class:`~segue.frontend.tokenizer_manager.TokenizerManager` adds what the scheduler sends, and the reader,
    which is the code that answers the client, takes it. The scheduler does not know stop strings: where one
    is complete, ``cut`` is set, further tokens are ignored, and the scheduler is asked to end the request.
    """

    request: InitVar[GenerateRequest]
    prompt_ids: Sequence[int]
    params: SamplingParams
    table: InitVar[TokenTable]
    created: float  # by the monotonic clock
    changed: Signal  # of its call; wakes the reader
    batches: tuple[str, ...] = ()  # ids by which it is aborted with others of its call
    alias: str = ""  # another id by which it can be aborted, and which other requests may share; "": none
    trace: CallTrace | None = None  # of its call; None: there are no spans
    rid: str = field(init=False)
    leg: str = field(init=False)  # as in the request
    wants_logprobs: bool = field(init=False)
    first_token_at: float = 0.0  # 0: there is none yet
    last_token_at: float = 0.0
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # as far as they are known
    streaming: bool = False  # whether every token wakes the reader, and not only the end
    discarded: bool = False  # whether the reader has left; only the end is awaited
    end: Finished | None = None
    ended_before: bool = False  # whether the client has the end already
    error: SegueError | None = None
    cut: int = -1  # tokens up to the end of a complete stop string; -1: none is complete
    _detokenizer: Detokenizer = field(init=False)
    _matcher: StopMatcher | None = field(init=False)
    _keep_stop: bool = field(init=False)
    _parts: list[str] = field(default_factory=list)  # the text, except what is held back
    _num_taken: tuple[int, int] = (0, 0)  # ids and parts of the text that were taken
    _length: int = 0  # characters detokenized, including those held back
    _matched: str | None = None

    def __post_init__(self, request: GenerateRequest, table: TokenTable) -> None:
        """Take from the request what is needed later: the request itself, with its prompt, is not kept."""
        options = request.options
        self.rid, self.leg = request.rid, request.leg
        self.wants_logprobs = self.params.logprobs >= 0
        self._detokenizer = Detokenizer(
            table, skip_special_tokens=options.skip_special_tokens, keeps_marks=request.keeps_marks
        )
        self._matcher = StopMatcher(options.stop, keep=options.keep_stop) if options.stop else None
        self._keep_stop = options.keep_stop

    # --- the scheduler's side ---

    def add(self, token: int, logprob: TokenLogprob | None, *, is_stop: bool) -> bool:
        """Take a token; ``is_stop``: it is a stop token. Return whether it completed a stop string."""
        if self.cut >= 0:
            return False
        self.ids.append(token)
        if self.wants_logprobs:
            assert logprob is not None
            self.logprobs.append(logprob)
            self.offsets.append(self._length)
        if is_stop and not self._keep_stop:
            return False
        text = self._detokenizer.push(token)
        return bool(text) and self._append_text(text)

    def prime(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprob], end: Finished | None = None
    ) -> None:
        """Take the output tokens with which the request begins; what they give, the client has already.

        ``logprobs``: one per token, if they were requested. ``end``: how the output has ended, if the client
        has that too. Afterwards :attr:`cut` says whether the tokens complete a stop string.

        Raises:
            InvalidRequestError: the numbers of tokens, of logprobs and of ``end`` contradict each other.
        """
        entries: Sequence[TokenLogprob | None] = logprobs if self.wants_logprobs else [None] * len(ids)
        if len(entries) != len(ids):
            text = (
                f"outputs: {len(ids)} tokens have {len(entries)} logprobs; the reply needs one of each token"
            )
            raise InvalidRequestError(text)
        for token, entry in zip(ids, entries, strict=True):
            self.add(token, entry, is_stop=token in self.params.stop_token_ids)
        if end is not None:
            if end.num_tokens != len(self.ids):
                text = f"outputs: the output has ended after {end.num_tokens} tokens, but has {len(self.ids)}"
                raise InvalidRequestError(f"{text}; send all of them")
            self.finish(structs.replace(end, rid=self.rid))
            self.ended_before = True
        self.take()
        # The first token was counted where it was made; until the next one comes, the client waits for that.
        self.first_token_at = self.last_token_at = self.created

    def finish(self, finished: Finished) -> Finished:
        """End the request as the scheduler did, or at a stop string, which the scheduler may not know of."""
        if self.cut < 0:
            rest = self._detokenizer.flush()
            if rest:
                self._append_text(rest)
            if self.cut < 0 and self._matcher is not None:
                self._parts.append(self._matcher.flush())
        if (cut := self.cut) >= 0:  # what was generated behind the stop string is no part of the reply
            versions = [(v, start, min(end, cut)) for v, start, end in finished.versions if start < cut]
            stopped = {"reason": "stop", "matched": self._matched, "message": None, "num_tokens": cut}
            finished = structs.replace(finished, **stopped, versions=versions)
        count = finished.num_tokens
        assert count == len(self.ids), f"request {self.rid}: {len(self.ids)} tokens came, not {count}"
        self.end = finished
        self.changed.set()
        return finished

    def fail(self, error: SegueError) -> None:
        """End the request with an error, unless it has ended already."""
        if not self.is_over:
            self.error = error
            self.changed.set()

    # --- the reader's side ---

    @property
    def taken_text(self) -> str:
        """The text that was taken, or that the client had before."""
        return "".join(self._parts[: self._num_taken[1]])

    def taken_pieces(self, first: int) -> list[str]:
        """Return the pieces of :attr:`taken_text` from number ``first`` on.

        There is at most one per token, and up to two at the end; some may be empty. Where they are cut
        depends on the tokens alone, and not on when they came.
        """
        return self._parts[first : self._num_taken[1]]

    @property
    def has_unread(self) -> bool:
        """Whether tokens have arrived since the last :meth:`take`."""
        return self._num_taken[0] < len(self.ids)

    @property
    def is_over(self) -> bool:
        """Whether the request has ended, be it with an error."""
        return self.end is not None or self.error is not None

    def take(self) -> Output:
        """Return the output since the last call."""
        token, part = self._num_taken
        self._num_taken = len(self.ids), len(self._parts)
        text = "".join(self._parts[part:])
        return Output(text, self.ids[token:], self.logprobs[token:], self.offsets[token:], self.end)

    def whole(self) -> Output:
        """Return the whole output, also what was taken before or was given to the client elsewhere."""
        self._parts, self._num_taken = ["".join(self._parts)], (0, 0)
        return self.take()

    def _append_text(self, text: str) -> bool:
        """Add text as far as it may be shown; return whether it completed a stop string.

        Stop strings do not count within the first ``min_new_tokens`` tokens.
        """
        self._length += len(text)
        if self._matcher is None or len(self.ids) <= self.params.min_new_tokens:
            self._parts.append(text)
            return False
        shown, self._matched = self._matcher.push(text)
        if shown:
            self._parts.append(shown)
        if self._matched is None:
            return False
        self.cut = len(self.ids)
        return True


class Generation:
    """The requests of one call, from their arrival to their ends.

    Leaving the ``with`` block aborts those that have not ended.
    """

    def __init__(self, num_requests: int, abort: Callable[[Sequence[str]], None], leg: str = "") -> None:
        """Begin a call of ``num_requests`` requests; ``abort`` aborts those that were sent, by their rids.

        ``leg`` is the id of the router's leg that the call is; "": it is none.
        """
        self.leg = leg
        self.states: list[RequestState] = []  # of the requests that were sent, in their order
        self.aborted: dict[str, str | None] = {}  # rid -> message, of the requests that were aborted before
        self.encoding: asyncio.Future[Any] | None = None  # of the prompts, unless it is done at once
        self.changed = Signal()  # a request has ended; while streaming, a token has arrived
        self._num_requests = num_requests
        self._abort = abort

    # --- before the requests are sent ---

    def abort(self, rid: str, message: str | None) -> bool:
        """Mark one request as aborted. Return False if it was aborted already."""
        if rid in self.aborted:
            return False
        self.aborted[rid] = message
        if len(self.aborted) == self._num_requests:
            self.stop_encoding()
        return True

    def stop_encoding(self) -> None:
        """None of the requests will run: their prompts are not needed."""
        if self.encoding is not None:
            self.encoding.cancel()

    # --- the reader's side ---

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort the requests that have not ended."""
        left = [state for state in self.states if not state.is_over and not state.discarded]
        for state in left:
            state.discarded = True
        self._abort([state.rid for state in left])

    async def outputs(self) -> list[Output]:
        """Wait for the end of every request, and return the whole output of each.

        Raises the first error at once.
        """
        waiting = self.states
        for state in waiting:
            state.streaming = False  # only ends wake the reader
        self.changed.set()  # to look at what has come before
        while waiting:
            await self.changed.wait()
            self.changed.clear()
            for state in waiting:
                if state.error is not None:
                    raise state.error
            waiting = [state for state in waiting if state.end is None]
        outputs = []
        for index, state in enumerate(self.states):
            outputs.append(state.whole())
            await turn(index)
        return outputs

    async def updates(self) -> AsyncGenerator[tuple[int, Output], None]:
        """Yield (index of the request, its new output) until all have ended.

        Nothing is yielded of those that had ended before. The first error is raised, once what came before it
        has been yielded.
        """
        running = {index: state for index, state in enumerate(self.states) if not state.ended_before}
        self._stream()
        while running:
            await self.changed.wait()
            self.changed.clear()
            error: SegueError | None = None
            for number, (index, state) in enumerate(list(running.items())):
                error = error or state.error
                if state.has_unread or state.end is not None:
                    output = state.take()
                    if output.end is not None:
                        del running[index]
                    yield index, output
                if number:  # most calls have one request
                    await turn(number)
            if error is not None:
                raise error

    async def accepted(self) -> None:
        """Wait until a request has output, at most ``ACCEPT_S``, because the scheduler may refuse a request.

        A refusal that comes before the reply begins is answered with its own status, and not within a stream.
        The scheduler refuses requests before it runs any of the same batch, so one output is enough.

        Raises:
            SegueError: a request was refused, or has failed.
        """
        self._stream()
        running = [state for state in self.states if not state.ended_before]
        if running and not any(state.has_unread or state.is_over for state in running):
            self.changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(ACCEPT_S):
                    await self.changed.wait()
        for state in running:
            if state.error is not None and not state.has_unread:
                raise state.error

    @property
    def ends(self) -> list[Finished]:
        """How the requests have ended that have ended without an error."""
        return [state.end for state in self.states if state.end is not None]

    def _stream(self) -> None:
        """Have every token wake the reader; also wake it now, for what has come before."""
        for state in self.states:
            state.streaming = True
        self.changed.set()
