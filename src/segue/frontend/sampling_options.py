"""What clients ask for in sampling, and its translation into :class:`SamplingParams`."""

from __future__ import annotations

import math
import secrets
from array import array
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec import structs

from segue.errors import ContextLengthError, InvalidRequestError, shown
from segue.messages.requests import SamplingParams

MAX_STOPS = 64
MAX_STOP_CHARS = 1 << 14  # of all stop strings of a request
MAX_LOGPROBS = 20
# Far from what anybody uses (1 to 2), and near enough to 1 that no finite logit overflows.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
SEED_LIMIT = 1 << 63
NUMPY_IDS = 64  # token ids of an array from which numpy is faster
MAX_ENTRIES = (
    1 << 18
)  # of `logit_bias` and `stop_token_ids` in one call, counted for each prompt they are for


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Sampling as the client asked for it, in OpenAI's names; defaults are OpenAI's.

    A model's ``generation_config.json`` gives EOS ids only: the temperature and top-p it recommends are not
    applied.
    """

    max_tokens: int | None = None  # None: the rest of the context
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1: off
    min_p: float = 0.0
    seed: int | None = None  # None: drawn
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = -1  # -1: none; 0: of the chosen token; n: and of the n likeliest
    prompt_logprobs_start: int = -1  # -1: none; else the first prompt position
    skip_special_tokens: bool = True  # leave special tokens out of the text
    keep_stop: bool = False  # leave a matched stop string or stop token in the text
    must_fit: bool = True  # a max_tokens that does not fit behind the prompt is an error, not clamped


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What requests are checked against: ``max_seq_len`` and ``vocab_size`` in tokens, and the EOS ids."""

    max_seq_len: int
    vocab_size: int
    eos_ids: Collection[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Checked options, for any number of prompts: what does not depend on the prompt is shared."""

    options: SamplingOptions
    limits: RequestLimits
    names: Mapping[str, str]
    shared: SamplingParams  # complete but for the token limits, the seed and the start of prompt logprobs

    def params(self, prompt_len: int) -> SamplingParams:
        """Work out the token limit and the seed of one prompt.

        Raises:
            ContextLengthError: the prompt, or the prompt and ``max_tokens``, do not fit the context.
        """
        options = self.options
        max_new_tokens = _max_new_tokens(options, prompt_len, self.limits, self.names)
        return structs.replace(
            self.shared,
            max_new_tokens=max_new_tokens,
            min_new_tokens=min(options.min_tokens, max_new_tokens),
            seed=secrets.randbits(63) if options.seed is None else options.seed % SEED_LIMIT,
            prompt_logprobs_start=min(options.prompt_logprobs_start, prompt_len),
        )


def prepare(options: SamplingOptions, limits: RequestLimits, names: Mapping[str, str]) -> Prepared:
    """Validate options, and work out the stop ids.

    ``names`` maps OpenAI's field names to those of the API in use, for error messages.

    Raises:
        InvalidRequestError: a value outside its rule.
    """
    check_options(options, limits, names)
    stop_ids = set(options.stop_token_ids)
    if not options.ignore_eos:
        stop_ids.update(limits.eos_ids)
    shared = SamplingParams(
        max_new_tokens=0,
        temperature=float(options.temperature),
        top_k=options.top_k if 0 < options.top_k < limits.vocab_size else 0,
        top_p=float(options.top_p),
        min_p=float(options.min_p),
        presence_penalty=float(options.presence_penalty),
        frequency_penalty=float(options.frequency_penalty),
        repetition_penalty=float(options.repetition_penalty),
        logit_bias={int(token): float(bias) for token, bias in options.logit_bias.items()},
        stop_token_ids=tuple(sorted(stop_ids)),
        logprobs=options.logprobs,
    )
    return Prepared(options=options, limits=limits, names=names, shared=shared)


def build_params(
    options: SamplingOptions, prompt_len: int, limits: RequestLimits, names: Mapping[str, str]
) -> SamplingParams:
    """Options for one prompt; raises what :func:`prepare` and :meth:`Prepared.params` do."""
    return prepare(options, limits, names).params(prompt_len)


def check_options(options: SamplingOptions, limits: RequestLimits, names: Mapping[str, str]) -> None:
    """Everything that does not depend on the prompt."""
    fail = _Rules(names)
    fail.outside("temperature", options.temperature, 0.0, None)
    fail.outside("top_p", options.top_p, 0.0, 1.0, open_below=True)
    fail.outside("min_p", options.min_p, 0.0, 1.0)
    fail.outside("top_k", options.top_k, -1, None)
    fail.outside("presence_penalty", options.presence_penalty, -2.0, 2.0)
    fail.outside("frequency_penalty", options.frequency_penalty, -2.0, 2.0)
    fail.outside(
        "repetition_penalty", options.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
    )
    fail.outside("min_tokens", options.min_tokens, 0, None)
    fail.outside("logprobs", options.logprobs, -1, MAX_LOGPROBS)
    if options.max_tokens is not None:
        fail.outside("max_tokens", options.max_tokens, 1, None)
        if options.min_tokens > options.max_tokens:
            rule = f"must be at most {fail.name('max_tokens')}={shown(options.max_tokens)}"
            fail.error("min_tokens", options.min_tokens, rule)
    if options.seed is not None:
        fail.outside("seed", options.seed, -SEED_LIMIT, SEED_LIMIT - 1)
    if len(options.stop) > MAX_STOPS:
        fail.error("stop", f"{len(options.stop)} strings", f"at most {MAX_STOPS} are allowed")
    if (count := sum(map(len, options.stop))) > MAX_STOP_CHARS:
        fail.error("stop", f"{count} characters", f"at most {MAX_STOP_CHARS} are allowed")
    if "" in options.stop:
        fail.error("stop", "", "an empty string cannot be a stop string; leave it out")
    for token in options.stop_token_ids:
        fail.outside("stop_token_ids", token, 0, limits.vocab_size - 1)
    for token, bias in options.logit_bias.items():
        fail.outside("logit_bias", token, 0, limits.vocab_size - 1)
        fail.outside("logit_bias", bias, -100.0, 100.0)


def check_batch(count: int, most: int, param: str) -> None:
    """Raise InvalidRequestError for a batch that is empty, or too large to wait in the queue."""
    if count == 0:
        raise InvalidRequestError(f"{param} is an empty list; it must have at least one prompt", param=param)
    if count > most:
        rule = f"at most {most} (--max-queued-requests) go in one call"
        raise InvalidRequestError(f"{param} has {count} prompts; {rule}", param=param)


def num_entries(options: SamplingOptions) -> int:
    """Entries of ``logit_bias`` and ``stop_token_ids``."""
    return len(options.logit_bias) + len(options.stop_token_ids)


def check_num_entries(count: int, num_prompts: int = 1) -> None:
    """Raise InvalidRequestError if so many entries of options, for so many prompts, are too many."""
    if count * num_prompts > MAX_ENTRIES:
        product = f" for {num_prompts} prompts, {count * num_prompts} in all" if num_prompts > 1 else ""
        raise InvalidRequestError(
            f"logit_bias and stop_token_ids have {count} entries{product}; at most {MAX_ENTRIES} are "
            "allowed in one call: give fewer entries, or send the prompts in several calls",
            param="logit_bias",
        )


def check_token_ids(ids: Collection[int], limits: RequestLimits, param: str) -> None:
    """Raise InvalidRequestError for an id that the model does not have."""
    lowest, highest = _extremes(ids) if ids else (0, 0)
    if lowest < 0 or highest >= limits.vocab_size:
        wrong = next(token for token in ids if not 0 <= token < limits.vocab_size)
        raise InvalidRequestError(
            f"{param} contains token id {shown(wrong)}; ids of this model are 0 to {limits.vocab_size - 1}",
            param=param,
        )


def _extremes(ids: Collection[int]) -> tuple[int, int]:
    if isinstance(ids, array) and len(ids) > NUMPY_IDS:
        view = np.frombuffer(ids, np.intc)
        return int(view.min()), int(view.max())
    return min(ids), max(ids)


def check_prompt_len(prompt_len: int, limits: RequestLimits, param: str, *, at_least: bool = False) -> None:
    """Raise if a prompt of so many tokens is empty, or leaves no room for one output token."""
    if prompt_len == 0:
        raise InvalidRequestError(f"{param} is empty; it must have at least one token", param=param)
    if prompt_len >= limits.max_seq_len:
        count = f"at least {prompt_len}" if at_least else prompt_len
        raise ContextLengthError(
            f"The prompt has {count} tokens, but this model's maximum context length is {limits.max_seq_len} "
            f"tokens, the output included; shorten the prompt to at most {limits.max_seq_len - 1} tokens.",
            param=param,
        )


def _max_new_tokens(
    options: SamplingOptions, prompt_len: int, limits: RequestLimits, names: Mapping[str, str]
) -> int:
    room = limits.max_seq_len - prompt_len
    if options.max_tokens is None or (options.max_tokens > room and not options.must_fit):
        return room
    if options.max_tokens > room:
        name = names.get("max_tokens", "max_tokens")
        raise ContextLengthError(
            f"{name}={shown(options.max_tokens)} does not fit: this model's maximum context length is "
            f"{limits.max_seq_len} tokens and the prompt has {prompt_len}; "
            f"ask for at most {room}, or leave {name} out.",
            param=name,
        )
    return options.max_tokens


class _Rules:
    """Checks that name the field as the client does."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def name(self, field_: str) -> str:
        return self._names.get(field_, field_)

    def error(self, field_: str, value: Any, rule: str) -> None:
        raise InvalidRequestError(f"{self.name(field_)}={shown(value)}: {rule}", param=self.name(field_))

    def outside(
        self, field_: str, value: float, low: float, high: float | None, *, open_below: bool = False
    ) -> None:
        above = value < math.inf if high is None else value <= high  # a comparison takes an int of any size
        below = value > low if open_below else value >= low
        if not (above and below):
            least = f"above {low:g}" if open_below else f"at least {low:g}"
            most = "" if high is None else f" and at most {high:g}"
            self.error(field_, value, f"must be {least}{most}")
