"""A request to the frontend, its state while it is in flight, and its output."""

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
    """One prompt, and the options for its continuation."""

    rid: str
    prompt: str | Sequence[int]
    options: SamplingOptions
    priority: int = 0
    add_special_tokens: bool = True  # to a text prompt; a rendered chat template contains its own
    param: str = "prompt"  # the client's field name of the prompt, for errors
    names: Mapping[str, str] = field(default_factory=dict)  # OpenAI's field names -> the client's


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The end of a request. ``num_tokens`` counts the output tokens of the reply, up to a stop string."""

    reason: str  # stop | length | abort
    matched: int | str | None
    message: str | None
    num_tokens: int
    prompt_tokens: int
    cached_tokens: int
    versions: list[tuple[str, int, int]]  # (weight version, start, end) in output tokens


@dataclass(slots=True)
class Output:
    """The output of a request since the last :meth:`RequestState.take`."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]  # one per token id, if they were requested
    offsets: list[int]  # start of each token in the whole text, if logprobs were requested
    end: End | None


class RequestState:
    """One request in flight: collects tokens, holds back text that may begin a stop string, and ends once."""

    __slots__ = (
        "_cut",
        "_detokenizer",
        "_keep_stop",
        "_length",
        "_matched",
        "_matcher",
        "_min_tokens",
        "_num_read",
        "_parts",
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
        self.streaming = False  # whether every token wakes the reader, and not only the end
        self.discarded = False  # whether the reader has left; only the end is awaited
        self.end: End | None = None
        self.error: SegueError | None = None
        self._detokenizer = Detokenizer(table, skip_special_tokens=options.skip_special_tokens)
        self._matcher = StopMatcher(options.stop, keep=options.keep_stop) if options.stop else None
        self._min_tokens = params.min_new_tokens  # stop strings count only after this many tokens
        self._keep_stop = options.keep_stop
        self._parts: list[str] = []  # text not yet read
        self._num_read = 0  # ids already read
        self._length = 0  # characters detokenized, including those held back
        self._matched: str | None = None
        self._cut = -1  # tokens up to the end of a complete stop string; -1: none is complete

    @property
    def has_unread(self) -> bool:
        """Whether tokens have arrived since the last :meth:`take`."""
        return self._num_read < len(self.ids)

    @property
    def cut(self) -> int:
        """The number of tokens up to the end of a complete stop string; -1 if there is none."""
        return self._cut

    def add(self, token: int, logprob: TokenLogprob | None, *, is_stop: bool) -> bool:
        """Take a token; ``is_stop``: it is a stop token. Return whether it completed a stop string."""
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
        return bool(text) and self._append_text(text)

    def finish(self, finished: Finished) -> End:
        """End the request as the scheduler did, or at a stop string, which the scheduler may not know of."""
        if self._cut < 0:
            rest = self._detokenizer.flush()
            if rest:
                self._append_text(rest)
            if self._cut < 0 and self._matcher is not None:
                self._parts.append(self._matcher.flush())
        count = finished.num_tokens if self._cut < 0 else self._cut
        assert count == len(self.ids), f"request {self.rid}: {len(self.ids)} tokens came, not {count}"
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
        """End the request with an error, unless it has ended already."""
        if self.end is None and self.error is None:
            self.error = error
            self.changed.set()

    def take(self) -> Output:
        """Return the output since the last call."""
        if self.error is None:
            self.changed.clear()
        start, self._num_read = self._num_read, len(self.ids)
        parts, self._parts = self._parts, []
        return Output("".join(parts), self.ids[start:], self.logprobs[start:], self.offsets[start:], self.end)

    def _append_text(self, text: str) -> bool:
        self._length += len(text)
        if self._matcher is None or len(self.ids) <= self._min_tokens:
            self._parts.append(text)
            return False
        shown, self._matched = self._matcher.push(text)
        if shown:
            self._parts.append(shown)
        if self._matched is None:
            return False
        self._cut = len(self.ids)
        return True
