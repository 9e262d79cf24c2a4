"""The bodies of the native API."""

from __future__ import annotations

from typing import Any

import pytest

from segue.api.native import NativeGenerate, NativeSampling, parse_call
from segue.errors import InvalidRequestError
from segue.frontend.request import GenerateRequest


def request_of(**body: Any) -> GenerateRequest:
    (request,) = parse_call({"text": "a"} | body, 10).requests
    return request


def test_null_is_the_default_of_every_field() -> None:
    names = {"text", *NativeGenerate.__struct_encode_fields__}
    sampling = dict.fromkeys(set(NativeSampling.__struct_encode_fields__) - {"max_new_tokens"})
    nulls = dict.fromkeys(names, None) | {"text": "a", "sampling_params": sampling}
    assert request_of(**nulls).options == request_of().options
    assert request_of(sampling_params=None).options == request_of().options


def test_the_length_null_is_the_rest_of_the_context_as_in_sglang() -> None:
    assert request_of(sampling_params={"max_new_tokens": None}).options.max_tokens is None
    assert request_of(sampling_params={"max_new_tokens": 0}).options.max_tokens == 0
    assert request_of(sampling_params={}).options.max_tokens == 128


def test_an_id_has_two_names() -> None:
    assert request_of(rid="one").rid == request_of(request_id="one").rid == "one"
    assert request_of(rid="one", request_id="one").rid == "one"
    with pytest.raises(InvalidRequestError, match="contradict each other") as raised:
        request_of(rid="one", request_id="other")
    assert raised.value.param == "request_id"


def test_a_salt_belongs_to_every_prompt_of_a_call() -> None:
    call = parse_call({"text": ["a", "b"], "cache_salt": "mine", "session_id": "s"}, 10)
    assert [request.cache_salt for request in call.requests] == ["mine", "mine"]
    assert request_of(cache_salt="").cache_salt == request_of().cache_salt == ""


@pytest.mark.parametrize("salt", ["x" * 1025, "\ud800", 5])
def test_a_wrong_salt_is_named(salt: Any) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        request_of(cache_salt=salt)
    assert raised.value.param == "cache_salt"


def test_the_number_of_alternatives_holds_for_prompts_too() -> None:
    options = request_of(return_logprob=True, logprob_start_len=0, top_logprobs_num=3).options
    assert (options.logprobs, options.prompt_logprobs_start, options.num_prompt_top) == (3, 0, 3)
    options = request_of(top_logprobs_num=3, logprob_start_len=0).options
    assert (options.logprobs, options.prompt_logprobs_start, options.num_prompt_top) == (-1, -1, 0)
