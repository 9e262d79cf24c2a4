"""Requests on their way in: their prompts become token ids, and they may be aborted meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from segue.errors import InvalidRequestError
from segue.frontend.request import GenerateRequest
from segue.frontend.sampling import Vocabulary, check_prompt_len, check_token_ids
from segue.frontend.tokenizer import Tokenizer

INLINE_CHARS = 4096  # of a call's texts; more are tokenized in a thread
PROBE_CHARS_PER_TOKEN = 16  # texts longer than this a token of context are judged by their beginning
PROBE_SLACK = 256  # tokens by which the beginning of a text may exceed the whole
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

    async def tokenize(
        self, requests: Sequence[GenerateRequest], tokenizer: Tokenizer | None, limits: Vocabulary
    ) -> list[Sequence[int]]:
        """Their prompts; empty ones, at once, if none of them is to run any more.

        Raises:
            InvalidRequestError: a token id outside the vocabulary, or a text without a tokenizer.
            ContextLengthError: a prompt that does not fit.
        """

        def work() -> list[Sequence[int]]:
            return [_tokenize(request, tokenizer, limits) for request in requests]

        if sum(len(each.prompt) for each in requests if isinstance(each.prompt, str)) <= INLINE_CHARS:
            return work()
        thread = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            either: set[asyncio.Future[Any]] = {thread, self._over}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            return thread.result() if thread.done() else [() for _ in requests]
        finally:
            thread.cancel()


def _tokenize(request: GenerateRequest, tokenizer: Tokenizer | None, limits: Vocabulary) -> Sequence[int]:
    prompt = request.prompt
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidRequestError(NO_TOKENIZER, param=request.param)
        prompt = _encode(prompt, request, tokenizer, limits)
    check_prompt_len(len(prompt), limits, request.param)
    check_token_ids(prompt, limits, request.param)
    return prompt


def _encode(text: str, request: GenerateRequest, tokenizer: Tokenizer, limits: Vocabulary) -> list[int]:
    """Tokenize; megabytes only if their beginning could fit the context."""
    special = request.add_special_tokens
    size = PROBE_CHARS_PER_TOKEN * limits.max_seq_len
    if len(text) > size:
        count = len(tokenizer.encode(text[:size], add_special_tokens=special)) - PROBE_SLACK
        if count >= limits.max_seq_len:
            check_prompt_len(count, limits, request.param, at_least=True)
    return tokenizer.encode(text, add_special_tokens=special)
