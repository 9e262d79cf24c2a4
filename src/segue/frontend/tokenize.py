"""Requests on their way in: their prompts become token ids, and they may be aborted meanwhile."""

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
from segue.frontend.thread_pool import Workers
from segue.frontend.tokenizer import Tokenizer

INLINE_COST = 4096  # of a call's prompts, in characters of text, that are tokenized on the event loop
IDS_PER_CHAR = 8  # token ids that are checked in the time in which one character is tokenized
PIECE_COST = 1 << 16  # what a worker does in one piece, in characters of text: some 20 ms
PIECE_REQUESTS = 256
INLINE_REQUESTS = 64
INLINE_ENTRIES = 1024  # of the options' `logit_bias` and `stop_token_ids`
PROBE_CHARS_PER_TOKEN = 16  # texts longer than this per token of context are judged in parts before the whole
PROBE_SLACK = 256  # tokens by which a part of a text may exceed its share of the whole
NO_TOKENIZER = "this model has no tokenizer; give the prompt as token ids"


class Arrival:
    """The requests of one call, until they are sent."""

    __slots__ = ("_num_requests", "_over", "aborted")

    def __init__(self, num_requests: int) -> None:
        self.aborted: dict[str, str | None] = {}  # rid -> message
        self._num_requests = num_requests
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def abort(self, rid: str, message: str | None) -> bool:
        """One of them is not to run; False: it was not before."""
        if rid in self.aborted:
            return False
        self.aborted[rid] = message
        if len(self.aborted) == self._num_requests:
            self.end()
        return True

    def end(self) -> None:
        """None of them is to run."""
        if not self._over.done():
            self._over.set_result(None)

    async def tokenize(self, requests: Sequence[GenerateRequest], encoder: Encoder) -> list[Sequence[int]]:
        """Their prompts; empty ones, at once, if none of them is to run any more.

        Raises:
            InvalidRequestError: a token id outside the vocabulary, or a text without a tokenizer.
            ContextLengthError: a prompt that does not fit.
        """
        if sum(map(_cost, requests)) <= INLINE_COST and len(requests) <= INLINE_REQUESTS:
            return encoder.encode_all(requests)
        work = asyncio.ensure_future(_encode_in_pieces(requests, encoder))
        try:
            either: set[asyncio.Future[Any]] = {work, self._over}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return [() for _ in requests] if self._over.done() else work.result()
        finally:
            work.cancel()


class Encoder:
    """Makes token ids of prompts, and refuses prompts that do not fit as early as possible."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: RequestLimits,
        chars_per_token: int | None,
        workers: Workers,
    ) -> None:
        """``chars_per_token``: at most so many characters become one token; None: nobody knows."""
        self.workers = workers
        self._tokenizer = tokenizer
        self._limits = limits
        self._chars_per_token = chars_per_token

    def encode(self, request: GenerateRequest) -> Sequence[int]:
        """One prompt; raises what :meth:`Arrival.tokenize` does."""
        prompt = request.prompt
        if isinstance(prompt, str):
            prompt = self._ids(prompt, request, special=request.add_special_tokens)
        check_prompt_len(len(prompt), self._limits, request.param)
        try:
            ids = prompt if isinstance(prompt, array) else array("i", prompt)
        except OverflowError:  # an id of more than 32 bits, which the check names
            check_token_ids(prompt, self._limits, request.param)
            raise
        check_token_ids(ids, self._limits, request.param)
        return ids

    def encode_all(self, requests: Sequence[GenerateRequest]) -> list[Sequence[int]]:
        """Several prompts."""
        return [self.encode(request) for request in requests]

    def check_num_chars(self, count: int, param: str) -> None:
        """Raise ContextLengthError if a text of so many characters is too long, whichever they are."""
        if self._chars_per_token is None:
            return
        least = -(-count // self._chars_per_token)
        if least >= self._limits.max_seq_len:
            check_prompt_len(least, self._limits, param, at_least=True)

    async def check_parts(self, request: GenerateRequest) -> None:
        """Raise ContextLengthError if parts of a long text alone are more than the context holds.

        The whole is tokenized in one go, which nothing can interrupt. Parts are soon done.
        """
        text = request.prompt
        if not isinstance(text, str) or len(text) <= PROBE_CHARS_PER_TOKEN * self._limits.max_seq_len:
            return
        self.check_num_chars(len(text), request.param)
        count = 0
        for start in range(0, len(text), PIECE_COST):
            part = text[start : start + PIECE_COST]
            count += len(await self.workers.run(partial(self._ids, part, request, special=False)))
            count -= PROBE_SLACK
            if count >= self._limits.max_seq_len:
                check_prompt_len(count, self._limits, request.param, at_least=True)

    def _ids(self, text: str, request: GenerateRequest, *, special: bool) -> list[int]:
        if self._tokenizer is None:
            raise InvalidRequestError(NO_TOKENIZER, param=request.param)
        return self._tokenizer.encode(text, add_special_tokens=special)


async def prepare_all(
    requests: Sequence[GenerateRequest], limits: RequestLimits, workers: Workers
) -> list[Prepared]:
    """The checked options of requests; those that share one object are checked once.

    Raises:
        InvalidRequestError: a value outside its rule.
    """
    different: dict[int, GenerateRequest] = {id(request.options): request for request in requests}
    prepared: dict[int, Prepared] = {}

    def work(part: Sequence[GenerateRequest]) -> None:
        for request in part:
            prepared[id(request.options)] = prepare(request.options, limits, request.names)

    owners = list(different.values())
    if len(owners) <= INLINE_REQUESTS and sum(_entries(owner.options) for owner in owners) <= INLINE_ENTRIES:
        work(owners)
    else:
        for start in range(0, len(owners), PIECE_REQUESTS):
            part = owners[start : start + PIECE_REQUESTS]
            await workers.run(partial(work, part))
    return [prepared[id(request.options)] for request in requests]


def _entries(options: SamplingOptions) -> int:
    return num_entries(options) + len(options.stop)


async def _encode_in_pieces(requests: Sequence[GenerateRequest], encoder: Encoder) -> list[Sequence[int]]:
    prompts: list[Sequence[int]] = []
    for part in _parts(requests):
        if len(part) == 1:
            await encoder.check_parts(part[0])
        prompts += await encoder.workers.run(partial(encoder.encode_all, part))
    return prompts


def _parts(requests: Sequence[GenerateRequest]) -> Iterator[list[GenerateRequest]]:
    """Neighbours that together cost no more than one piece of work, and longer ones alone."""
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
    """In characters of text."""
    prompt = request.prompt
    return len(prompt) if isinstance(prompt, str) else len(prompt) // IDS_PER_CHAR
