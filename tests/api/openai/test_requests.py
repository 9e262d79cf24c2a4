from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from segue.api.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    chat_call,
    completion_call,
)
from segue.api.validation import parse
from segue.errors import InvalidRequestError, ModelNotFoundError, UnsupportedFieldError
from segue.frontend.tokenizer import PromptEncoder, ServedModel


async def render(messages: list[dict[str, Any]]) -> str:
    return str(messages)


MODEL = ServedModel(
    names=["name", "path/to"], max_prompts=10, encoder=cast(PromptEncoder, SimpleNamespace(render=render))
)


CHAT = {"model": "name", "messages": [{"role": "user", "content": "x"}]}


def chat(**fields: Any) -> Any:
    return asyncio.run(chat_call(parse(ChatCompletionRequest, CHAT | fields), MODEL))


def complete(**fields: Any) -> Any:
    body = parse(CompletionRequest, {"model": "name", "prompt": "x", **fields})
    return completion_call(body, MODEL)


def test_a_rendered_template_has_its_own_special_tokens_and_a_text_gets_them() -> None:
    assert chat().requests[0].add_special_tokens is False
    assert complete().requests[0].add_special_tokens is True


def test_defaults_are_openais() -> None:
    options = chat().requests[0].options
    assert (options.temperature, options.top_p, options.max_tokens, options.seed) == (1.0, 1.0, None, None)
    assert options.must_fit


def test_zero_is_a_value_and_not_a_missing_one() -> None:
    options = complete(temperature=0, seed=0, min_tokens=0).requests[0].options
    assert (options.temperature, options.seed) == (0, 0)


def test_the_models_path_is_a_name_too() -> None:
    complete(model="path/to")
    with pytest.raises(ModelNotFoundError, match="'other'"):
        complete(model="other")


def test_choices_of_a_batch_have_rids_of_their_own() -> None:
    two, one = complete(prompt=["a", "b"]), complete()
    assert [request.rid for request in two.requests] == [f"{two.id}-0", f"{two.id}-1"]
    assert [request.rid for request in one.requests] == [one.id]


def test_an_id_and_a_time_are_made_for_each_call() -> None:
    body = parse(CompletionRequest, {"model": "name", "prompt": ["a", "b"]})
    made, other = (completion_call(body, MODEL) for _ in range(2))
    assert made.id.startswith("cmpl-") and made.id != other.id and made.batch_id == made.id
    assert abs(made.created - time.time()) < 60
    assert asyncio.run(chat_call(parse(ChatCompletionRequest, CHAT), MODEL)).id.startswith("chatcmpl-")


@pytest.mark.parametrize("model", [None, "unknown", "default"])
def test_a_model_that_is_left_out_is_the_served_one(model: str | None) -> None:
    assert chat(model=model).model == complete(model=model).model == "name"
    assert asyncio.run(chat_call(parse(ChatCompletionRequest, {"messages": CHAT["messages"]}), MODEL))


@pytest.mark.parametrize("name", ["rid", "request_id"])
def test_a_clients_id_is_that_of_the_reply_and_of_its_requests(name: str) -> None:
    for made in (chat(**{name: "mine"}), complete(**{name: "mine"})):
        assert made.id == "mine" and [request.rid for request in made.requests] == ["mine"]
    two = complete(prompt=["a", "b"], **{name: "mine"})
    assert (two.id, two.batch_id) == ("mine", "mine")
    assert [request.rid for request in two.requests] == ["mine-0", "mine-1"]


def test_an_id_goes_before_that_of_a_router() -> None:
    for rid, expected in (("mine", "mine"), (None, "routers")):
        body = parse(CompletionRequest, {"prompt": "x", "rid": rid})
        assert completion_call(body, MODEL, "routers").id == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"rid": "x" * 257}, "rid"),
        ({"rid": "a", "request_id": "b"}, "request_id"),
        ({"priority": 1 << 40}, "priority"),
        ({"cache_salt": "x" * 1025}, "cache_salt"),
        ({"seed": 1, "sampling_seed": 2}, "sampling_seed"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
    ],
)
def test_what_is_wrong_in_any_of_them_is_named(fields: dict[str, Any], param: str) -> None:
    for call in (chat, complete):
        with pytest.raises((InvalidRequestError, UnsupportedFieldError)) as raised:
            call(**fields)
        assert raised.value.param == param


def test_lists_of_tokens_count_once_for_each_choice() -> None:
    for call in (chat, complete):
        with pytest.raises(InvalidRequestError, match="for 9 choices"):
            call(n=9, allowed_token_ids=list(range(30_000)))
        assert len(call(n=8, allowed_token_ids=list(range(30_000))).requests) == 8


def test_priority_and_salt_are_those_of_every_request() -> None:
    for made in (chat(priority=3, cache_salt="s"), complete(prompt=["a", "b"], priority=3, cache_salt="s")):
        assert {(request.priority, request.cache_salt) for request in made.requests} == {(3, "s")}


def test_options_of_other_engines() -> None:
    options = complete(skip_special_tokens=False, no_stop_trim=True, sampling_seed=7).requests[0].options
    assert (options.skip_special_tokens, options.keep_stop, options.seed) == (False, True, 7)
    assert chat(include_stop_str_in_output=True).requests[0].options.keep_stop
    assert complete(add_special_tokens=False).requests[0].add_special_tokens is False
    assert chat(top_logprobs=0).requests[0].options.logprobs == -1
    obfuscation = {"include_usage": True, "include_obfuscation": True}
    assert complete(stream=True, stream_options=obfuscation).usage_in_stream
