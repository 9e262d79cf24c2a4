"""A response is the chat that its body says, and its errors have the names of that body."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from segue.api.openai.requests import chat_call, parse_chat
from segue.api.openai.responses.call import WantedResponse, parse_responses, responses_call
from segue.errors import InvalidRequestError, ModelNotFoundError, SegueError
from segue.frontend.chat_template import ChatForm, ChatTemplate
from segue.frontend.thread_pool import ThreadPool
from segue.frontend.tokenizer import PromptEncoder, ServedModel
from tests.support.tool_model import HERMES

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "name": "f", "parameters": PARAMETERS, "strict": True}
CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
USER = {"role": "user", "content": "Hi"}
SAME = {
    **{"temperature": 0.5, "top_p": 0.5, "top_k": 3, "seed": 1, "stop": ["a"], "min_tokens": 2},
    **{"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.5, "min_p": 0.1},
    **{"priority": 2, "cache_salt": "s", "bootstrap_host": "h", "bootstrap_room": 3},
    **{"parallel_tool_calls": False, "chat_template_kwargs": {"enable_thinking": True}},
}
BAD_CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}
SCHEMA = {"type": "object", "additionalProperties": False}


async def render(messages: list[dict[str, Any]], **fields: Any) -> str:
    return json.dumps([messages, fields])


@pytest.fixture
def model() -> ServedModel:
    encoder = SimpleNamespace(render=render, thread_pool=ThreadPool())
    template = ChatTemplate.of(HERMES)
    chat = ChatForm(template=template, tools="hermes", thinks=True)
    return ServedModel(names=["m"], max_prompts=10, encoder=cast(PromptEncoder, encoder), chat=chat)


def responded(model: ServedModel, **body: Any) -> WantedResponse:
    return asyncio.run(responses_call(parse_responses({"input": "Hi"} | body), model))


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({}, {}),
        ({"max_output_tokens": 5}, {"max_completion_tokens": 5}),
        ({"instructions": "x"}, {"messages": [{"role": "system", "content": "x"}, USER]}),
        (SAME, SAME),
        ({"tools": [TOOL]}, {"tools": [CHAT_TOOL]}),
        ({"tools": [TOOL], "tool_choice": "required"}, {"tools": [CHAT_TOOL], "tool_choice": "required"}),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}},
            {"tools": [CHAT_TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        ),
        ({"reasoning": {"effort": "none"}}, {"reasoning_effort": "none"}),
    ],
)
def test_it_generates_as_the_chat_does(
    model: ServedModel, body: dict[str, Any], chat: dict[str, Any]
) -> None:
    wanted = responded(model, **body)
    asked = parse_chat({"messages": [USER]} | chat)
    other = asyncio.run(chat_call(asked, model))
    (ours,), (theirs,) = wanted.requests, other.requests

    def essence(request: Any) -> Any:
        options = {name: getattr(request.options, name) for name in request.options.__dataclass_fields__}
        fields = ("prompt", "priority", "cache_salt", "add_special_tokens", "bootstrap", "keeps_marks")
        return {**options, "names": None}, [getattr(request, name) for name in fields]

    assert essence(ours) == essence(theirs)
    assert (wanted.form, wanted.stream, wanted.n) == (other.form, other.stream, 1)
    assert wanted.id == ours.rid and wanted.id.startswith("resp_")


def test_the_reply_repeats_the_body_with_the_values_in_use(model: ServedModel) -> None:
    plain = json.loads(responded(model).echo)
    assert (plain["temperature"], plain["top_p"], plain["tools"], plain["tool_choice"]) == (1, 1, [], "auto")
    assert plain["text"] == {"format": {"type": "text"}} and plain["metadata"] == {}
    given: dict[str, Any] = {
        "instructions": "x",
        "metadata": {"who": "me"},
        "tools": [TOOL | {"description": None}],
        "tool_choice": {"type": "function", "name": "f"},
        "max_output_tokens": 7,
        "reasoning": {"effort": "none", "summary": None},
        "parallel_tool_calls": False,
        "temperature": 0,
    }
    echo = json.loads(responded(model, **given, store=True, user="me", service_tier="flex").echo)
    assert {name: echo[name] for name in given} == given
    assert (echo["store"], echo["background"], echo["service_tier"]) == (False, False, "default")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [BAD_CALL]}, "input[0].arguments"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.type"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"effort": "odd"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "text", "schema": SCHEMA}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object", "schema": False}}}, "text.format.schema"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"temperature": 3}, "temperature"),
        ({"stream_options": {}}, "stream_options"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"n": 2}, "n"),
        ({"messages": []}, "messages"),
    ],
)
def test_errors_name_the_fields_of_the_body(model: ServedModel, body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        responded(model, **body)
    assert raised.value.param == param, raised.value.message
    assert "messages[" not in raised.value.message and "function." not in raised.value.message


def test_two_fields_that_guide_the_output_are_named(model: ServedModel) -> None:
    text = {"format": {"type": "json_object"}}
    with pytest.raises(InvalidRequestError, match=r"^tool_choice and text\.format both guide"):
        responded(model, tools=[TOOL], tool_choice="required", text=text)


def test_options_are_named_as_in_the_body_for_errors_that_come_later(model: ServedModel) -> None:
    (request,) = responded(model, text={"format": {"type": "json_schema", "schema": SCHEMA}}).requests
    assert request.param == "input" and request.options.names["max_tokens"] == "max_output_tokens"
    assert request.options.names["grammar"] == "text.format.schema"


def test_another_model_is_not_found(model: ServedModel) -> None:
    with pytest.raises(ModelNotFoundError):
        asyncio.run(responses_call(parse_responses({"input": "Hi", "model": "another"}), model))
    with pytest.raises(SegueError, match="JSON object"):
        parse_responses([])


def test_an_error_keeps_the_clients_own_text(model: ServedModel) -> None:
    own = "messages[9].tool_calls[0].function.arguments"
    with pytest.raises(InvalidRequestError) as raised:
        responded(model, input=[USER, BAD_CALL | {"arguments": own}])
    assert raised.value.param == "input[1].arguments" and own in raised.value.message
