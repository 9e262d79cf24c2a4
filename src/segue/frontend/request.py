"""A request on its way in, and what comes out of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from segue.errors import SegueError
from segue.frontend.detokenizer import Detokenizer, TokenTable
from segue.frontend.sampling_options import SamplingOptions
from segue.frontend.stop import StopMatcher
from segue.messages.requests import Finished, SamplingParams, TokenLogprob

MAX_PRIORITY = 1 << 31
LOWEST_LOGPROB = -9999.0  # instead of minus infinity, which JSON cannot write


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One prompt and how to continue it."""

    rid: str
    prompt: str | Sequence[int]
    options: SamplingOptions
    priority: int = 0
    add_special_tokens: bool = True  # of a text prompt; a rendered chat template has its own
    param: str = "prompt"  # the client's name of the prompt, for errors
    names: Mapping[str, str] = field(default_factory=dict)  # OpenAI's field names to the client's


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a request ended; the counts are those of the tokens that count."""

    reason: str  # stop | length | abort
    matched: int | str | None
    message: str | None
    num_tokens: int
    prompt_tokens: int
    cached_tokens: int
    versions: list[tuple[str, int, int]]  # (weight version, start, end) over the output tokens


@dataclass(slots=True)
class Output:
    """What became known of a request since the last look."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]  # parallel to token_ids, if they were asked for
    offsets: list[int]  # where each token begins in the whole text, if logprobs were asked for
    end: End | None


class RequestState:
    """One request in flight: takes tokens as they come, holds back what may not be shown yet, ends once."""

    __slots__ = (
        "_cut",
        "_detokenizer",
        "_done_ids",
        "_keep_stop",
        "_length",
        "_matched",
        "_matcher",
        "_parts",
        "_stop_from",
        "batch_id",
        "changed",
        "created",
        "discarded",
        "end",
        "error",
        "first_token_at",
        "ids",
        "last_token_at",
        "logprobs",
        "offsets",
        "prompt_ids",
        "prompt_logprobs",
        "prompt_logprobs_start",
        "rid",
        "streaming",
        "wants_logprobs",
    )

    def __init__(
        self,
        request: GenerateRequest,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        table: TokenTable,
        created: float,
    ) -> None:
        options = request.options
        self.rid = request.rid
        self.batch_id: str | None = None
        self.prompt_ids = prompt_ids
        self.prompt_logprobs_start = params.prompt_logprobs_start
        self.wants_logprobs = params.logprobs >= 0
        self.created = created
        self.first_token_at = 0.0
        self.last_token_at = 0.0
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.offsets: list[int] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.changed = asyncio.Event()
        self.streaming = False  # wake the reader at every token, not only at the end
        self.discarded = False  # the reader has gone; only the end is awaited
        self.end: End | None = None
        self.error: SegueError | None = None
        self._detokenizer = Detokenizer(table, skip_special_tokens=options.skip_special_tokens)
        self._matcher = StopMatcher(options.stop, keep=options.keep_stop) if options.stop else None
        self._stop_from = params.min_new_tokens  # stop strings count only behind so many tokens
        self._keep_stop = options.keep_stop
        self._parts: list[str] = []  # text not yet read
        self._done_ids = 0  # ids already read
        self._length = 0  # characters detokenized, those held back included
        self._matched: str | None = None
        self._cut = -1  # tokens that count, once a stop string is complete

    @property
    def has_unread(self) -> bool:
        """Whether tokens came since the last :meth:`take`."""
        return self._done_ids < len(self.ids)

    @property
    def cut(self) -> int:
        """The number of tokens that a completed stop string leaves; -1 if there is none."""
        return self._cut

    def add(self, token: int, logprob: TokenLogprob | None, *, is_stop: bool) -> bool:
        """Take a token; ``is_stop`` if it ended the request. True if it completed a stop string."""
        if self._cut >= 0:
            return False
        self.ids.append(token)
        if self.wants_logprobs:
            assert logprob is not None
            self.logprobs.append(logprob)
            self.offsets.append(self._length)
        if is_stop and not self._keep_stop:
            return False
        text = self._detokenizer.push(token)
        return bool(text) and self._show(text)

    def finish(self, finished: Finished) -> End:
        """The scheduler has ended it. Cuts at a stop string, which the scheduler may not have known of."""
        if self._cut < 0:
            tail = self._detokenizer.flush()
            if tail:
                self._show(tail)
            if self._cut < 0 and self._matcher is not None:
                self._parts.append(self._matcher.flush())
        count = finished.num_tokens if self._cut < 0 else self._cut
        assert count == len(self.ids), f"request {self.rid}: {len(self.ids)} tokens came, {count} count"
        self.end = End(
            reason=finished.reason if self._cut < 0 else "stop",
            matched=finished.matched if self._cut < 0 else self._matched,
            message=finished.message if self._cut < 0 else None,
            num_tokens=count,
            prompt_tokens=finished.prompt_tokens,
            cached_tokens=finished.cached_tokens,
            versions=[(v, start, min(end, count)) for v, start, end in finished.versions if start < count],
        )
        self.changed.set()
        return self.end

    def fail(self, error: SegueError) -> None:
        """It ends with an error, unless it has ended already."""
        if self.end is None and self.error is None:
            self.error = error
            self.changed.set()

    def take(self) -> Output:
        """What is new since the last call."""
        if self.error is None:
            self.changed.clear()
        start, self._done_ids = self._done_ids, len(self.ids)
        parts, self._parts = self._parts, []
        return Output("".join(parts), self.ids[start:], self.logprobs[start:], self.offsets[start:], self.end)

    def _show(self, text: str) -> bool:
        self._length += len(text)
        if self._matcher is None or len(self.ids) <= self._stop_from:
            self._parts.append(text)
            return False
        shown, self._matched = self._matcher.push(text)
        if shown:
            self._parts.append(shown)
        if self._matched is None:
            return False
        self._cut = len(self.ids)
        return True
