"""Tokenizes the prompts of arriving requests, which may be aborted meanwhile."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from segue.errors import InvalidRequestError
from segue.frontend.request import GenerateRequest
from segue.frontend.sampling_options import (
    Prepared,
    RequestLimits,
    SamplingOptions,
    check_prompt_len,
    check_token_ids,
    num_entries,
    prepare,
)
from segue.frontend.thread_pool import ThreadPool
from segue.frontend.tokenizer import Tokenizer
from segue.sizes import ceil_div

INLINE_COST = 4096  # most characters of a call's prompts that are tokenized on the event loop
IDS_PER_CHAR = 8  # token ids that are checked in the time that tokenizing one character takes
PIECE_COST = 1 << 16  # characters that a thread tokenizes in one piece of work: about 20 ms
PIECE_REQUESTS = 256  # most requests in one piece of work
INLINE_REQUESTS = 64  # most requests that are handled on the event loop
INLINE_ENTRIES = 1024  # most entries of `logit_bias`, `stop_token_ids` and `stop` that are checked there
PROBE_CHARS_PER_TOKEN = 16  # texts longer than this times the context are first checked in parts
PROBE_SLACK = 256  # tokens by which a part alone may exceed its share of the whole text
NO_TOKENIZER = "this model has no tokenizer; give the prompt as token ids"


class PendingCall:
    """The requests of one call, until they are sent to the scheduler."""

    __slots__ = ("_ended", "_num_requests", "aborted")

    def __init__(self, num_requests: int) -> None:
        self.aborted: dict[str, str | None] = {}  # rid -> message
        self._num_requests = num_requests
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

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
        if not self._ended.done():
            self._ended.set_result(None)

    async def tokenize(self, requests: Sequence[GenerateRequest], encoder: Encoder) -> list[Sequence[int]]:
        """Return the token ids of the requests' prompts; empty ones, at once, if all requests are aborted.

        Raises:
            InvalidRequestError: a token id is outside the vocabulary, or a text has no tokenizer.
            ContextLengthError: a prompt does not fit the context.
        """
        if sum(map(_cost, requests)) <= INLINE_COST and len(requests) <= INLINE_REQUESTS:
            return encoder.encode_all(requests)
        work = asyncio.ensure_future(_encode_in_pieces(requests, encoder))
        try:
            either: set[asyncio.Future[Any]] = {work, self._ended}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return [() for _ in requests] if self._ended.done() else work.result()
        finally:
            work.cancel()


class Encoder:
    """Turns prompts into token ids, and refuses prompts that do not fit the context as early as possible."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: RequestLimits,
        chars_per_token: int | None,
        thread_pool: ThreadPool,
    ) -> None:
        """``chars_per_token``: the most characters that become one token; None: there is no bound."""
        self.thread_pool = thread_pool
        self._tokenizer = tokenizer
        self._limits = limits
        self._chars_per_token = chars_per_token

    def encode(self, request: GenerateRequest) -> Sequence[int]:
        """Return the token ids of one prompt. Raises as :meth:`PendingCall.tokenize` does."""
        prompt = request.prompt
        if isinstance(prompt, str):
            prompt = self._ids(prompt, request, special=request.add_special_tokens)
        check_prompt_len(len(prompt), self._limits, request.param)
        try:
            ids = prompt if isinstance(prompt, array) else array("i", prompt)
        except OverflowError:  # an id of more than 32 bits, which the next check reports
            check_token_ids(prompt, self._limits, request.param)
            raise
        check_token_ids(ids, self._limits, request.param)
        return ids

    def encode_all(self, requests: Sequence[GenerateRequest]) -> list[Sequence[int]]:
        return [self.encode(request) for request in requests]

    def check_num_chars(self, count: int, param: str) -> None:
        """Raise ContextLengthError if any text of ``count`` characters is too long for the context."""
        if self._chars_per_token is None:
            return
        least = ceil_div(count, self._chars_per_token)
        if least >= self._limits.max_seq_len:
            check_prompt_len(least, self._limits, param, at_least=True)

    async def check_parts(self, request: GenerateRequest) -> None:
        """Raise ContextLengthError if the parts of a long text already exceed the context.

        The whole text is tokenized in one call, which cannot be interrupted. A part takes little time.
        """
        text = request.prompt
        if not isinstance(text, str) or len(text) <= PROBE_CHARS_PER_TOKEN * self._limits.max_seq_len:
            return
        self.check_num_chars(len(text), request.param)
        count = 0
        for start in range(0, len(text), PIECE_COST):
            part = text[start : start + PIECE_COST]
            count += len(await self.thread_pool.run(partial(self._ids, part, request, special=False)))
            count -= PROBE_SLACK
            if count >= self._limits.max_seq_len:
                check_prompt_len(count, self._limits, request.param, at_least=True)

    def _ids(self, text: str, request: GenerateRequest, *, special: bool) -> list[int]:
        if self._tokenizer is None:
            raise InvalidRequestError(NO_TOKENIZER, param=request.param)
        return self._tokenizer.encode(text, add_special_tokens=special)


async def prepare_all(
    requests: Sequence[GenerateRequest], limits: RequestLimits, thread_pool: ThreadPool
) -> list[Prepared]:
    """Return the checked options of the requests. Options that requests share are checked once.

    Raises:
        InvalidRequestError: a value breaks its rule.
    """
    distinct: dict[int, GenerateRequest] = {id(request.options): request for request in requests}
    prepared: dict[int, Prepared] = {}

    def work(part: Sequence[GenerateRequest]) -> None:
        for request in part:
            prepared[id(request.options)] = prepare(request.options, limits, request.names)

    owners = list(distinct.values())
    if len(owners) <= INLINE_REQUESTS and sum(_entries(owner.options) for owner in owners) <= INLINE_ENTRIES:
        work(owners)
    else:
        for start in range(0, len(owners), PIECE_REQUESTS):
            part = owners[start : start + PIECE_REQUESTS]
            await thread_pool.run(partial(work, part))
    return [prepared[id(request.options)] for request in requests]


def _entries(options: SamplingOptions) -> int:
    return num_entries(options) + len(options.stop)


async def _encode_in_pieces(requests: Sequence[GenerateRequest], encoder: Encoder) -> list[Sequence[int]]:
    prompts: list[Sequence[int]] = []
    for part in _split(requests):
        if len(part) == 1:
            await encoder.check_parts(part[0])
        prompts += await encoder.thread_pool.run(partial(encoder.encode_all, part))
    return prompts


def _split(requests: Sequence[GenerateRequest]) -> Iterator[list[GenerateRequest]]:
    """Split the requests into runs of neighbours that are one piece of work each; a longer one is alone."""
    part: list[GenerateRequest] = []
    cost = 0
    for request in requests:
        if part and (cost + _cost(request) > PIECE_COST or len(part) == PIECE_REQUESTS):
            yield part
            part, cost = [], 0
        part.append(request)
        cost += _cost(request)
    yield part


def _cost(request: GenerateRequest) -> int:
    """Return the cost of a prompt, as a number of characters to tokenize."""
    prompt = request.prompt
    return len(prompt) if isinstance(prompt, str) else len(prompt) // IDS_PER_CHAR
