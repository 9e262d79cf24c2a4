from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from segue.errors import ContextLengthError, InvalidRequestError
from segue.frontend.bad_words import MAX_BAD_WORD_CHARS, MAX_BAD_WORDS
from segue.frontend.sampling_options import (
    MAX_STOP_CHARS,
    MAX_STOPS,
    RequestLimits,
    SamplingOptions,
    num_entries,
)
from segue.frontend.tokenizer import check_prompt_len, check_token_ids
from segue.messages.guided import GrammarSpec
from segue.messages.requests import SamplingParams, unpack_ids

LIMITS = RequestLimits(max_seq_len=100, vocab_size=50, eos_ids=(2, 7))


def build(prompt_len: int = 10, names: dict[str, str] | None = None, **options: Any) -> SamplingParams:
    made = SamplingOptions(**options, names=names or {})
    return made.prompt_params(made.shared_params(LIMITS), prompt_len, LIMITS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("top_k", -2),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 0.009),
        ("repetition_penalty", 101),
        ("repetition_penalty", 1e39),
        ("min_tokens", -1),
        ("max_tokens", -1),
        ("seed", 1 << 63),
        ("seed", -(1 << 63) - 1),
        ("logprobs", 21),
        ("stop", ("a", "")),
        ("stop", ("a",) * (MAX_STOPS + 1)),
        ("stop", ("a", "a" * MAX_STOP_CHARS)),
        ("stop_token_ids", (50,)),
        ("stop_token_ids", (-1,)),
        ("logit_bias", {50: 1.0}),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: float("nan")}),
        ("allowed_token_ids", (1, 50)),
        ("allowed_token_ids", ()),
        ("bad_words", ("a", "")),
        ("bad_words", ("a",) * (MAX_BAD_WORDS + 1)),
        ("bad_words", ("a" * (MAX_BAD_WORD_CHARS + 1),)),
    ],
)
def test_a_value_outside_its_rule_is_an_error_that_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=field) as raised:
        build(**{field: value})
    assert raised.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("top_p", 1.0),
        ("top_k", -1),
        ("min_p", 1.0),
        ("seed", -(1 << 63)),
        ("logit_bias", {0: -100.0, 49: 100.0}),
        ("stop_token_ids", (0, 49)),
        ("max_tokens", 90),
        ("max_tokens", 0),
        ("logprobs", 20),
        ("repetition_penalty", 0.01),
        ("repetition_penalty", 100),
    ],
)
def test_a_value_at_its_limit_is_accepted(field: str, value: Any) -> None:
    build(**{field: value})


def test_an_option_raises_the_number_of_alternatives() -> None:
    options = SamplingOptions(logprobs=100, num_prompt_top=100)
    with pytest.raises(InvalidRequestError, match="--max-logprobs"):
        options.check(LIMITS)
    options.check(replace(LIMITS, max_logprobs=100))


def test_errors_use_the_names_of_the_api() -> None:
    with pytest.raises(InvalidRequestError, match="max_new_tokens=-1") as raised:
        build(names={"max_tokens": "max_new_tokens"}, max_tokens=-1)
    assert raised.value.param == "max_new_tokens"


def test_omitted_max_tokens_is_the_rest_of_the_context() -> None:
    assert build(prompt_len=30).max_new_tokens == 70


def test_max_tokens_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(ContextLengthError, match=r"max_tokens=91.*at most 90"):
        build(max_tokens=91)


def test_max_tokens_that_do_not_fit_are_clamped_where_the_api_says_so() -> None:
    assert build(max_tokens=91, must_fit=False).max_new_tokens == 90


def test_min_tokens_above_max_tokens_is_an_error() -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens=6"):
        build(max_tokens=5, min_tokens=6)


def test_eos_ids_and_the_clients_stop_the_request() -> None:
    assert build(stop_token_ids=(40, 2)).stop_token_ids == (2, 7, 40)


def test_allowed_tokens_travel_once_each_and_bad_words_as_tokens() -> None:
    made = SamplingOptions(allowed_token_ids=[7, 3, 7], bad_words=["a"])
    params = made.shared_params(LIMITS, ((1,), (2, 3)))
    assert unpack_ids(params.allowed_token_ids) == [3, 7]
    assert params.bad_words == ((1,), (2, 3))
    assert num_entries(made) == 3 + 1


def test_ignore_eos_leaves_the_clients_stop_tokens() -> None:
    assert build(stop_token_ids=(40,), ignore_eos=True).stop_token_ids == (40,)


def test_a_seed_is_drawn_where_none_is_given() -> None:
    seeds = {build().seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_a_given_seed_is_kept_and_a_negative_one_made_positive() -> None:
    assert build(seed=5).seed == 5
    assert build(seed=-1).seed == (1 << 63) - 1


@pytest.mark.parametrize("top_k", [-1, 0, 50, 51])
def test_top_k_that_excludes_nothing_is_off(top_k: int) -> None:
    assert build(top_k=top_k).top_k == 0


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({"temperature": 0}, "plain"),
        ({"temperature": 0.7, "logprobs": 0}, "plain"),
        ({"top_p": 0.9}, "filtered"),
        ({"top_k": 20, "logprobs": 0}, "filtered"),
        ({"min_p": 0.1}, "filtered"),
        ({"grammar": GrammarSpec("regex", "a"), "top_p": 0.9, "logprobs": 0}, "guided"),
        ({"grammar": GrammarSpec("regex", "a"), "presence_penalty": 0.5}, "full"),
        ({"logprobs": 1}, "full"),
        ({"top_p": 0.9, "presence_penalty": 0.5}, "full"),
    ],
)
def test_a_request_has_the_cheapest_sampling_mode_that_serves_it(options: dict[str, Any], mode: str) -> None:
    assert build(**options).sampling_mode == mode


def test_empty_and_too_long_prompts_are_errors() -> None:
    with pytest.raises(InvalidRequestError, match="input_ids is empty"):
        check_prompt_len(0, LIMITS, "input_ids")
    with pytest.raises(ContextLengthError, match=r"100 tokens.*at most 99"):
        check_prompt_len(100, LIMITS, "prompt")
    check_prompt_len(99, LIMITS, "prompt")


@pytest.mark.parametrize("wrong", [-1, 50, 1 << 40])
def test_token_ids_out_of_range_are_errors(wrong: int) -> None:
    with pytest.raises(InvalidRequestError, match=str(wrong)):
        check_token_ids([1, wrong, 2], LIMITS, "prompt")
    check_token_ids([0, 49], LIMITS, "prompt")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"temperature": -1}, "temperature=-1: must be at least 0"),
        ({"top_p": 0.0}, "top_p=0.0: must be above 0 and at most 1"),
        ({"top_k": -2}, "top_k=-2: must be at least -1"),
        ({"repetition_penalty": 0}, "repetition_penalty=0: must be at least 0.01 and at most 100"),
        ({"logprobs": -2}, "logprobs=-2: must be at least -1"),
        ({"logprobs": 21}, "logprobs=21: at most 20 (--max-logprobs) are allowed"),
        ({"num_prompt_top": 21}, "num_prompt_top=21: at most 20 (--max-logprobs) are allowed"),
        ({"logit_bias": {50: 1.0}}, "logit_bias=50: must be at least 0 and at most 49"),
        ({"allowed_token_ids": [50]}, "allowed_token_ids=50: must be at least 0 and at most 49"),
        (
            {"allowed_token_ids": []},
            "allowed_token_ids=[]: must have at least one token id; leave it out to allow all",
        ),
        ({"bad_words": [""]}, "bad_words='': an empty string cannot be a bad word; leave it out"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens=6: must be at most max_tokens=5"),
    ],
)
def test_an_error_says_the_whole_rule(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        build(**options)
    assert raised.value.message == text
