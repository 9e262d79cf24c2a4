"""The sampling fields of the command line: those of OpenAI's bodies, checked before a request is made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from segue.errors import InvalidRequestError, UnsupportedFieldError

SAMPLING_FIELDS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
)
_ANY_SIZE = 1 << 31  # of a vocabulary or a context that is not known here


def check_sampling(params: Mapping[str, Any]) -> None:
    """Check the types and the ranges of sampling fields, as far as they do not depend on the model.

    Raises:
        UnsupportedFieldError: a field is unknown; the text has the nearest name.
        InvalidRequestError: a value breaks its rule.
    """
    from segue.api.openai.requests import RULES, SamplingBody
    from segue.api.validation import parse
    from segue.frontend.sampling_options import RequestLimits, SamplingOptions

    for name in params:
        if name not in SAMPLING_FIELDS:
            raise UnsupportedFieldError(
                f"{name!r} is no sampling field{nearest(name, SAMPLING_FIELDS)}; there are: "
                + ", ".join(SAMPLING_FIELDS),
                param=name,
            )
    body = parse(SamplingBody, params, rules=RULES)
    limits = RequestLimits(max_seq_len=_ANY_SIZE, vocab_size=_ANY_SIZE, eos_ids=())
    SamplingOptions.of(body, {}, keep_stop=body.include_stop_str_in_output).check(limits)


def parse_setting(text: str) -> tuple[str, Any]:
    """Return name and value of a text like "temperature=0.7"; the value is None where nothing follows.

    A value is JSON; any other text is a string, so that ``stop=END`` needs no quotation marks.

    Raises:
        InvalidRequestError: the text has no "=".
    """
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise InvalidRequestError(f"{text!r} sets nothing; say NAME=VALUE, like temperature=0.7")
    name = name.replace("-", "_")
    try:
        return name, json.loads(value) if value else None
    except ValueError:
        return name, value


def nearest(name: str, known: tuple[str, ...] | list[str]) -> str:
    """Return which known name may have been meant, as a part of an error; "" for none."""
    found = get_close_matches(name, known, 1)
    return f" (did you mean {found[0]!r}?)" if found else ""
