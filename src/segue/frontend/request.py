"""A request to the frontend, its state while it is in flight, and its output."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial

from msgspec import structs

from segue.errors import SegueError
from segue.frontend.detokenizer import Detokenizer, TokenTable
from segue.frontend.sampling_options import Prepared, RequestLimits, SamplingOptions, num_entries, prepare
from segue.frontend.stop import StopMatcher
from segue.frontend.thread_pool import ThreadPool
from segue.messages.requests import Finished, SamplingParams, TokenLogprob

MAX_PRIORITY = 1 << 31
LOWEST_LOGPROB = -9999.0  # instead of minus infinity, which JSON cannot write
INLINE_REQUESTS = 64  # most requests that are handled on the event loop
INLINE_OPTIONS = 1024  # most entries of `logit_bias`, `stop_token_ids` and `stop` that are checked there
PIECE_REQUESTS = 256  # most requests in one piece of work


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt, and the options for its continuation."""

    rid: str
    prompt: str | Sequence[int]
    options: SamplingOptions
    priority: int = 0
    add_special_tokens: bool = True  # to a text prompt; a rendered chat template contains its own
    param: str = "prompt"  # the client's field name of the prompt, for errors
    names: Mapping[str, str] = field(default_factory=dict)  # OpenAI's field names -> the client's
    outputs: Sequence[int] = ()  # output tokens that the client has already; the request goes on behind them
    output_logprobs: Sequence[TokenLogprob] = ()  # one per output token, if they were requested


async def prepare_all(
    requests: Sequence[GenerateRequest], limits: RequestLimits, thread_pool: ThreadPool
) -> list[Prepared]:
    """Return the checked options of the requests. Options that requests share are checked once.

    Raises:
        InvalidRequestError: a value breaks its rule.
    """
    owners = list({id(request.options): request for request in requests}.values())
    prepared: dict[int, Prepared] = {}

    def work(part: Sequence[GenerateRequest]) -> None:
        for request in part:
            prepared[id(request.options)] = prepare(request.options, limits, request.names)

    entries = sum(num_entries(owner.options) + len(owner.options.stop) for owner in owners)
    if len(owners) <= INLINE_REQUESTS and entries <= INLINE_OPTIONS:
        work(owners)
    else:
        for start in range(0, len(owners), PIECE_REQUESTS):
            await thread_pool.run(partial(work, owners[start : start + PIECE_REQUESTS]))
    return [prepared[id(request.options)] for request in requests]


class PendingCall:
    """The requests of one call, until they are sent to the scheduler."""

    __slots__ = ("_num_requests", "aborted", "ended")

    def __init__(self, num_requests: int) -> None:
        self.aborted: dict[str, str | None] = {}  # rid -> message
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # none will run
        self._num_requests = num_requests

    def abort(self, rid: str, message: str | None) -> bool:
        """Mark one request as aborted. Return False if it was aborted already."""
        if rid in self.aborted:
            return False
        self.aborted[rid] = message
        if len(self.aborted) == self._num_requests:
            self.end()
        return True

    def end(self) -> None:
        """End the tokenization: none of the requests will run."""
        if not self.ended.done():
            self.ended.set_result(None)


@dataclass(slots=True)
class Output:
    """The output of a request since the last :meth:`RequestState.take`."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]  # one per token id, if they were requested
    offsets: list[int]  # start of each token in the whole text, if logprobs were requested
    end: Finished | None


@dataclass(slots=True, eq=False)
class RequestState:
    """One request in flight: collects tokens, holds back text that may begin a stop string, and ends once.

    Its reader takes the output. Leaving a ``with`` block of it before its end aborts the request.
    """

    request: InitVar[GenerateRequest]
    prompt_ids: Sequence[int]
    params: SamplingParams
    table: InitVar[TokenTable]
    created: float  # by the monotonic clock
    discard: Callable[[RequestState], None] | None = None  # aborts the request, unless it has ended
    batch_id: str | None = None
    rid: str = field(init=False)
    wants_logprobs: bool = field(init=False)
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # as far as they are known
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # wakes the reader; a call has one
    streaming: bool = False  # whether every token wakes the reader, and not only the end
    discarded: bool = False  # whether the reader has left; only the end is awaited
    end: Finished | None = None
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
        options = request.options
        self.rid = request.rid
        self.wants_logprobs = self.params.logprobs >= 0
        self._detokenizer = Detokenizer(table, skip_special_tokens=options.skip_special_tokens)
        self._matcher = StopMatcher(options.stop, keep=options.keep_stop) if options.stop else None
        self._keep_stop = options.keep_stop

    def __enter__(self) -> RequestState:
        return self

    def __exit__(self, *_: object) -> None:
        if self.discard is not None:
            self.discard(self)

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

    def prime(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        """Take the output tokens with which the request begins; what they give, the client has already.

        ``logprobs``: one per token, if they were requested. Afterwards :attr:`cut` says whether the tokens
        complete a stop string.
        """
        entries: Sequence[TokenLogprob | None] = logprobs if self.wants_logprobs else [None] * len(ids)
        for token, entry in zip(ids, entries, strict=True):
            self.add(token, entry, is_stop=token in self.params.stop_token_ids)
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
        if (cut := self.cut) >= 0:
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

    async def result(self) -> Output:
        """Wait for the end, and return the whole output. Raises the error that ended the request."""
        while not self.is_over:
            self.changed.clear()
            await self.changed.wait()
        if self.error is not None:
            raise self.error
        return self.whole()

    def _append_text(self, text: str) -> bool:
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
