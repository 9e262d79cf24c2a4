"""The messages about one request, from its arrival in the scheduler to its end.

A list of token ids that could be long travels as int32 little-endian bytes: msgpack spends an object per id.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Literal

import msgspec

from segue.messages.guided import GrammarSpec

FIRST_WEIGHT_VERSION = "0"
BEFORE_PREFILL = "Abort before prefill"  # the abort message of a request that never ran
# handoff: the request goes on in a decode worker
FinishReason = Literal["stop", "length", "abort", "error", "handoff"]
SamplingMode = Literal["plain", "filtered", "guided", "full"]  # each mode includes the one before it


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as int32 bytes."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Return the token ids of int32 bytes: the inverse of :func:`pack_ids`."""
    return array("i", data).tolist()


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """How one request is sampled. The frontend validates the values; scheduler and runner trust them."""

    max_new_tokens: int  # 0: the prompt is computed, and no token comes of it
    min_new_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # random numbers depend on (seed, position) and on nothing else
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    # all ids that end the request: EOS (unless ignored) and the client's
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int = -1  # -1: none; 0: the chosen token's; n: also those of the n likeliest tokens
    prompt_logprobs_start: int = -1  # first prompt position whose logprob is returned; -1: none
    num_prompt_top: int = 0  # likeliest tokens that are reported with each of these
    allowed_token_ids: bytes = b""  # int32 ids; empty: every token is allowed
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of tokens that the output must not have
    # All of the output belongs to it. An end token is then drawn before `min_new_tokens` only where the
    # grammar allows no other token, and ends the request all the same.
    grammar: GrammarSpec | None = None
    late_eos: bool = False  # whether EOS is drawn only where the grammar allows no other token

    @property
    def sampling_mode(self) -> SamplingMode:
        """The cheapest sampling mode that can serve this request.

        ``plain``: argmax, or temperature with keyed noise. ``filtered``: also top-k, top-p or min-p. Both
        give the chosen token's log-probability, which RL asks for with every token. ``guided``: also a
        grammar. ``full``: anything else.
        """
        if (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
            or self.logit_bias
            or self.allowed_token_ids
            or self.bad_words
            or self.min_new_tokens > 0
            or self.logprobs > 0
        ):
            return "full"
        if self.grammar is not None:
            return "guided"
        return "filtered" if self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0 else "plain"


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The natural-log probability of a token, and those of the likeliest tokens at its position."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = []
    rank: int = 0  # of the token, 1 is the likeliest; 0: not asked for. Only tokens of prompts have one


class Handoff(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The part of a request that one of two workers does: its prefill, or the decoding behind it."""

    id: int  # 63 random bits, the same for both parts
    part: Literal["prefill", "decode"]
    peer: str = ""  # decode: where the prefill worker can be reached
    # decode: whether this worker alone answers the client. Then it may compute the prompt itself if no KV
    # comes; otherwise it may do so only once it knows the first token, which the client may have.
    whole: bool = False


class AddRequest(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Adds a request. Requests with a larger ``priority`` run first.

    A request may go on from ``outputs``, tokens that an engine has generated for it before: their KV is
    computed again, and sampling, penalties and limits go on as if the request had never been interrupted.
    The replies carry only the tokens behind ``outputs``, but count them in ``num_tokens``.
    """

    rid: str
    prompt: bytes  # int32 token ids
    params: SamplingParams
    priority: int = 0
    # int32 token ids, at most max_new_tokens; one that ends the request must be the last
    outputs: bytes = b""
    handoff: Handoff | None = None  # None: this worker does all of it
    shares_kv: bool = True  # False: its KV is neither taken from the prefix cache nor left there
    cache_salt: str = ""  # KV is shared among requests of the same salt only; "": among those without one


class Finish(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ends a request after its first ``num_tokens`` output tokens, because they contain a stop string."""

    rid: str
    num_tokens: int


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ends one request, or all, whether waiting or running. An unknown ``rid`` has no effect."""

    rid: str = ""
    abort_all: bool = False
    message: str | None = None


class PhaseTimes(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """When a request went from one phase to the next, by the host's monotonic clock; 0: it did not."""

    added: float = 0.0  # it came to the scheduler
    admitted: float = 0.0  # the first step that computes some of its prompt was planned
    prefilled: float = 0.0  # its first token was known here, be it from a prefill worker
    taken_over: float = 0.0  # the KV of its prompt had come from a prefill worker


NO_TIMES = PhaseTimes()


class Finished(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Reports the end of a request. It is sent exactly once per request.

    The frontend replaces what a stop string changes: ``reason``, ``matched``, ``message``, ``num_tokens`` and
    ``versions``.
    """

    rid: str
    reason: FinishReason
    num_tokens: int  # output tokens of the reply, those that the request began with included
    prompt_tokens: int
    cached_tokens: int  # prompt tokens
    matched: int | str | None = None  # the stop token or stop string that ended the request, if one did
    message: str | None = None
    # (weight version, start, end) in output tokens; none covers the tokens that the request began with. Where
    # no token was asked for, there is one of no tokens: the weights that the prompt's end was computed with.
    versions: list[tuple[str, int, int]] = []
    error: str | None = None  # class name in ``segue.errors`` of the error that ended it, if one did
    times: PhaseTimes = NO_TIMES

    @property
    def client_reason(self) -> str:
        """The reason as clients know it: to them a handoff is an end by length, after the first token."""
        return "length" if self.reason == "handoff" else self.reason


class Rejected(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Reports that a request was refused. ``kind`` is the name of the error's class in ``segue.errors``."""

    rid: str
    kind: str
    message: str
