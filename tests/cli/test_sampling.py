"""Sampling fields from the command line."""

from __future__ import annotations

from typing import Any

import pytest

from segue.api.openai.requests import SamplingBody
from segue.cli.sampling import SAMPLING_FIELDS, check_sampling, parse_setting
from segue.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("temperature=0.7", ("temperature", 0.7)),
        ("top-k = 5", ("top_k", 5)),
        ("stop=END", ("stop", "END")),
        ('stop=["a", "b"]', ("stop", ["a", "b"])),
        ("seed=", ("seed", None)),
    ],
)
def test_a_setting_has_a_name_and_a_value(text: str, expected: object) -> None:
    assert parse_setting(text) == expected


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"temperatur": 1}, "'temperatur' is no sampling field .did you mean 'temperature'"),
        ({"temperature": "warm"}, "temperature.*a number"),
        ({"temperature": -1}, "temperature=-1.*at least 0"),
        ({"top_p": 0}, "top_p=0.*above 0"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5.*max_tokens=4"),
        ({"stop": ""}, "stop"),
    ],
)
def test_a_wrong_field_is_named(params: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        check_sampling(params)


def test_every_field_is_one_of_the_api_and_may_be_left_out() -> None:
    assert set(SAMPLING_FIELDS) <= set(SamplingBody.__struct_fields__)
    check_sampling(dict.fromkeys(SAMPLING_FIELDS))
