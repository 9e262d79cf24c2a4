"""The sampling options of clients, and their translation into :class:`SamplingParams`."""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, NoReturn, cast, get_type_hints

from msgspec import Meta, structs

from segue.errors import ContextLengthError, InvalidRequestError, invalid_value, short_repr
from segue.frontend.bad_words import Words, check_bad_words
from segue.frontend.choices import SEED_LIMIT, choice_seed
from segue.messages.guided import GrammarSpec
from segue.messages.requests import SamplingParams, pack_ids

MAX_STOPS = 64
MAX_STOP_CHARS = 1 << 14  # of all stop strings of a request together
# Entries of `logit_bias`, `stop_token_ids` and `allowed_token_ids`, and characters of `bad_words`, in one
# call; they count once per choice.
MAX_ENTRIES = 1 << 18
DEFAULT_MAX_LOGPROBS = 20
_FLOATS = tuple(each.name for each in structs.fields(SamplingParams) if each.type is float)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The limits of a model: ``max_seq_len`` and ``vocab_size`` in tokens, and the EOS ids.

    ``max_logprobs`` is an option's: the most alternatives that are reported with one log-probability.
    """

    max_seq_len: int
    vocab_size: int
    eos_ids: Collection[int]
    max_logprobs: int = DEFAULT_MAX_LOGPROBS


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """The sampling options of a request, with OpenAI's names and defaults.

    ``Meta`` says what a value may be, where that does not depend on the model; without ``le``, any finite
    number that is large enough. :meth:`check` checks it, so that the whole rule is in the error.

    Of a model's ``generation_config.json``, the EOS ids are used, and with ``--sampling-defaults model`` also
    the temperature, top-p and top-k that it recommends.
    """

    # None: the rest of the context; 0: the prompt is computed, and no token comes of it
    max_tokens: Annotated[int | None, Meta(ge=0)] = None
    min_tokens: Annotated[int, Meta(ge=0)] = 0
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0  # 0 and -1: off
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int | None, Meta(ge=-SEED_LIMIT, le=SEED_LIMIT - 1)] = None  # None: random
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    # Far outside the usual range (1 to 2), yet near enough to 1 that no finite logit overflows.
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None  # None: every token is allowed
    bad_words: Sequence[str] = ()  # that the output must not have
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    grammar: GrammarSpec | None = None  # all of the output belongs to it; `segue.frontend.grammars` checks it
    # -1: none; 0: the chosen token's; n: also those of the n likeliest tokens
    logprobs: Annotated[int, Meta(ge=-1)] = -1
    prompt_logprobs_start: int = -1  # first prompt position with logprobs; -1: none
    num_prompt_top: Annotated[int, Meta(ge=0)] = 0  # likeliest tokens that are reported with each of these
    skip_special_tokens: bool = True  # whether special tokens are left out of the text
    keep_stop: bool = False  # whether a matched stop string or stop token stays in the text
    must_fit: bool = True  # whether a max_tokens that does not fit is an error; else it is clamped
    names: Mapping[str, str] = field(default_factory=dict)  # of these fields in the API in use, for errors

    @classmethod
    def of(cls, body: object, defaults: Mapping[str, float], **others: Any) -> SamplingOptions:
        """Return the options that a client's body has as fields; None, or no field, is the default.

        ``defaults`` take the place of those of this class. ``others`` replace what the body has.
        """
        given = {name: getattr(body, name, None) for name in cls.__dataclass_fields__} | others
        if isinstance(given["stop"], str):
            given["stop"] = (given["stop"],)
        return cls(**{**defaults, **{name: value for name, value in given.items() if value is not None}})

    def shared_params(self, limits: RequestLimits, bad_words: Words = ()) -> SamplingParams:
        """Check the options, and return the parameters that any number of prompts share.

        ``bad_words`` are those of the options as tokens.

        They lack what depends on the prompt (token limits, seed and start of the prompt logprobs), which
        :meth:`prompt_params` adds.

        Raises:
            InvalidRequestError: a value breaks its rule.
        """
        self.check(limits)
        stop_ids = set(self.stop_token_ids)
        if not self.ignore_eos or self.grammar is not None:  # a grammar may leave nothing but EOS
            stop_ids.update(limits.eos_ids)
        floats: dict[str, Any] = {name: float(getattr(self, name)) for name in _FLOATS}
        return SamplingParams(
            max_new_tokens=0,
            **floats,
            top_k=self.top_k if 0 < self.top_k < limits.vocab_size else 0,
            logit_bias={int(token): float(bias) for token, bias in self.logit_bias.items()},
            stop_token_ids=tuple(sorted(stop_ids)),
            allowed_token_ids=pack_ids(sorted(set(self.allowed_token_ids or ()))),
            logprobs=self.logprobs,
            num_prompt_top=self.num_prompt_top,
            bad_words=bad_words,
            grammar=self.grammar,
            late_eos=self.ignore_eos and self.grammar is not None,
        )

    def prompt_params(
        self,
        shared: SamplingParams,
        prompt_len: int,
        limits: RequestLimits,
        seed: int | None = None,
        choice: int = 0,
    ) -> SamplingParams:
        """Return the parameters for choice ``choice`` of one prompt of ``prompt_len`` tokens.

        ``seed`` takes the place of a random one, for options without a seed.

        Raises:
            ContextLengthError: the prompt with its ``max_tokens`` does not fit the context.
        """
        room = limits.max_seq_len - prompt_len
        max_tokens = room if self.max_tokens is None else self.max_tokens
        if max_tokens > room and self.must_fit:
            name = self._name("max_tokens")
            raise ContextLengthError(
                f"{name}={short_repr(max_tokens)} does not fit: this model's maximum context length is "
                f"{limits.max_seq_len} tokens and the prompt has {prompt_len}; "
                f"ask for at most {room}, or leave {name} out.",
                param=name,
            )
        max_tokens = min(max_tokens, room)
        if self.seed is not None:
            seed = choice_seed(self.seed % SEED_LIMIT, choice)
        return structs.replace(
            shared,
            max_new_tokens=max_tokens,
            min_new_tokens=min(self.min_tokens, max_tokens),
            seed=secrets.randbits(63) if seed is None else seed,
            prompt_logprobs_start=min(self.prompt_logprobs_start, prompt_len),
        )

    def check(self, limits: RequestLimits) -> None:
        """Check all options as far as they do not depend on the prompt; raises as :meth:`shared_params`."""
        for option, rule in _RANGES.items():
            if (value := getattr(self, option)) is not None:
                self._check_range(option, value, rule)
        for option in ("logprobs", "num_prompt_top"):
            if (count := getattr(self, option)) > limits.max_logprobs:
                self._fail(option, count, f"at most {limits.max_logprobs} (--max-logprobs) are allowed")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            most = f"{self._name('max_tokens')}={short_repr(self.max_tokens)}"
            self._fail("min_tokens", self.min_tokens, f"must be at most {most}")
        if len(self.stop) > MAX_STOPS:
            self._fail("stop", f"{len(self.stop)} strings", f"at most {MAX_STOPS} are allowed")
        if (count := sum(map(len, self.stop))) > MAX_STOP_CHARS:
            self._fail("stop", f"{count} characters", f"at most {MAX_STOP_CHARS} are allowed")
        if "" in self.stop:
            self._fail("stop", "", "an empty string cannot be a stop string; leave it out")
        token_id, bias_range = Meta(ge=0, le=limits.vocab_size - 1), Meta(ge=-100, le=100)
        for token in self.stop_token_ids:
            self._check_range("stop_token_ids", token, token_id)
        if self.allowed_token_ids is not None and not len(self.allowed_token_ids):
            self._fail("allowed_token_ids", [], "must have at least one token id; leave it out to allow all")
        for token in self.allowed_token_ids or ():
            self._check_range("allowed_token_ids", token, token_id)
        check_bad_words(self.bad_words, partial(self._fail, "bad_words"))
        for token, bias in self.logit_bias.items():
            self._check_range("logit_bias", token, token_id)
            self._check_range("logit_bias", bias, bias_range)

    def _check_range(self, option: str, value: float, rule: Meta) -> None:
        """Raise InvalidRequestError unless a value of ``option`` is within the bounds of ``rule``."""
        # Comparisons, unlike conversions, work for integers of any size.
        least = value > rule.gt if rule.gt is not None else value >= cast(float, rule.ge)
        if not (least and (value < math.inf if rule.le is None else value <= rule.le)):
            low = f"at least {rule.ge:g}" if rule.gt is None else f"above {rule.gt:g}"
            most = "" if rule.le is None else f" and at most {rule.le:g}"
            self._fail(option, value, f"must be {low}{most}")

    def _fail(self, option: str, value: Any, rule: str) -> NoReturn:
        raise invalid_value(self._name(option), value, rule)

    def _name(self, option: str) -> str:
        return self.names.get(option, option)


_RANGES: dict[str, Meta] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(SamplingOptions, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}


def bounds_of(option: str) -> Meta:
    """Return the bounds of an option for the description of a field; the option's `check` enforces them."""
    rule = _RANGES[option]
    bounds = {"minimum": rule.ge, "exclusiveMinimum": rule.gt, "maximum": rule.le}
    return Meta(extra_json_schema={name: bound for name, bound in bounds.items() if bound is not None})


def num_entries(options: SamplingOptions) -> int:
    """Return the number of entries of the options that are lists of tokens; a bad word has its characters."""
    num_chars = sum(map(len, options.bad_words))
    return (
        len(options.logit_bias)
        + len(options.stop_token_ids)
        + len(options.allowed_token_ids or ())
        + num_chars
    )


def check_num_entries(count: int, num_prompts: int = 1) -> None:
    """Raise InvalidRequestError for more than MAX_ENTRIES: ``count`` entries for each of ``num_prompts``."""
    if count * num_prompts > MAX_ENTRIES:
        total = f" for {num_prompts} choices, {count * num_prompts} in all" if num_prompts > 1 else ""
        raise InvalidRequestError(
            f"logit_bias, stop_token_ids, allowed_token_ids and the characters of bad_words have {count} "
            f"entries{total}; at most {MAX_ENTRIES} are allowed in one call: give fewer entries, or send the "
            "prompts in several calls",
            param="logit_bias",
        )
