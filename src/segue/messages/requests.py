"""A request, from its arrival in the scheduler to its end.

Token ids travel as int32 little-endian bytes where a list could be long: msgpack spends an object per id.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Literal

import msgspec

FIRST_WEIGHT_VERSION = "0"
BEFORE_PREFILL = "Abort before prefill"  # what is said of a request that was aborted then
FinishReason = Literal["stop", "length", "abort", "error"]
SamplingMode = Literal["plain", "filtered", "full"]  # each does what the one before it does, and more


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as int32 bytes."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The inverse of :func:`pack_ids`."""
    return array("i", data).tolist()


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How one request is sampled; validated by the frontend, so the scheduler and the runner trust it."""

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # random numbers are keyed by (seed, position), nothing else
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[
        int, ...
    ] = ()  # every id that ends the request: EOS (unless ignored) and the client's own
    logprobs: int = -1  # -1: none; 0: of the chosen token; n: and of the n likeliest
    prompt_logprobs_start: int = -1  # -1: none; else the first prompt position whose logprob is wanted

    @property
    def sampling_mode(self) -> SamplingMode:
        """What choosing a token takes.

        ``plain``: argmax, or temperature with keyed noise. ``filtered``: top-k, top-p or min-p too. Both give
        the chosen token's log-probability, which RL asks for with every token. ``full``: anything else.
        """
        if (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.min_new_tokens > 0
            or self.logprobs > 0
        ):
            return "full"
        return "filtered" if self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0 else "plain"


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The natural-log probability of a token, and of the likeliest alternatives at its position."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = []


class AddRequest(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """A new request. ``priority``: larger runs first."""

    rid: str
    prompt: bytes  # int32 token ids
    params: SamplingParams
    priority: int = 0


class Finish(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The detokenizer found a stop string: the request ends with its first ``num_tokens`` output tokens."""

    rid: str
    num_tokens: int


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End one request, or all, wherever it is; an unknown rid does nothing."""

    rid: str = ""
    abort_all: bool = False
    message: str | None = None


class Finished(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A request's end, sent exactly once."""

    rid: str
    reason: FinishReason
    num_tokens: int  # output tokens that count
    prompt_tokens: int
    cached_tokens: int
    matched: int | None = None  # the stop token, where one ended it
    message: str | None = None
    versions: list[tuple[str, int, int]] = []  # (weight version, start, end) over the output tokens
    error: str | None = None  # the class in ``segue.errors`` of the error that ended it; None: it has a reply


class Rejected(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request that was never accepted; ``kind`` is the name of the error's class in ``segue.errors``."""

    rid: str
    kind: str
    message: str
