"""The items of an input become the messages of a chat."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from segue.api.openai.requests import ChatMessage, messages_of
from segue.api.openai.responses.call import parse_responses
from segue.api.openai.responses.conversation import conversation_of
from segue.errors import InvalidRequestError, UnsupportedFieldError


def messages(given: Any, **fields: Any) -> list[ChatMessage]:
    body = parse_responses({"input": given} | fields)
    return asyncio.run(conversation_of(body)).messages


def rendered(given: Any, **fields: Any) -> list[dict[str, Any]]:
    """The messages as a chat template gets them."""
    return asyncio.run(messages_of(messages(given, **fields)))


def part(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text}


def call(call_id: str = "call_1") -> dict[str, Any]:
    name = {"name": "f", "arguments": '{"a": 1}'}
    return {"type": "function_call", "id": f"fc_{call_id}", "call_id": call_id, "status": "completed", **name}


USER = {"role": "user", "content": "Hi"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [part("reasoning_text", "Hm.")]}
TEXT = {"type": "output_text", "text": "Yes.", "annotations": [], "logprobs": []}
SAID = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [TEXT]}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "3"}


def test_a_string_is_a_message_of_the_user_behind_the_instructions() -> None:
    assert rendered("Hi") == [USER]
    assert rendered("Hi", instructions="Be brief.") == [{"role": "system", "content": "Be brief."}, USER]


def test_what_the_model_wrote_in_one_turn_is_one_message() -> None:
    second = RESULT | {"call_id": "call_2", "output": [part("input_text", "a"), part("input_text", "b")]}
    turn = [USER, THOUGHT, SAID, call(), call("call_2"), RESULT, second, THOUGHT, SAID]
    user, first, one, two, last = rendered(turn)
    assert user == USER
    assert (first["role"], first["content"], first["reasoning"]) == ("assistant", "Yes.", "Hm.")
    assert [each["id"] for each in first["tool_calls"]] == ["call_1", "call_2"]
    assert first["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert one == {"role": "tool", "content": "3", "tool_call_id": "call_1"}
    assert two == {"role": "tool", "content": "a\nb", "tool_call_id": "call_2"}
    assert (last["content"], last["reasoning"]) == ("Yes.", "Hm.") and "tool_calls" not in last


def test_a_text_behind_a_call_or_a_text_begins_a_message() -> None:
    assert [each.content for each in messages([call(), SAID, SAID])] == [
        None,
        *([messages([SAID])[0].content] * 2),
    ]
    thoughts = [THOUGHT, {"type": "reasoning", "summary": [part("summary_text", "Or so.")]}]
    assert [each.reasoning for each in messages([*thoughts, SAID])] == ["Hm.", "Or so."]
    assert messages([USER, {"type": "reasoning", "summary": []}, USER]) == messages([USER, USER])


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_a_message_needs_no_type(role: str) -> None:
    (found,) = messages([{"role": role, "content": "x", "phase": None}])
    assert (found.role, found.content) == (role, "x")
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert rendered([refused]) == [{"role": "assistant", "content": "No."}]


IMAGE = {"type": "input_image", "image_url": "data:", "detail": "auto"}


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "item_reference", "id": "msg_1"}, "input[1].type"),
        ({"type": "web_search_call", "id": "ws_1", "action": {}, "status": "completed"}, "input[1].type"),
        ({"role": "user", "content": [part("input_text", "a"), IMAGE]}, "input[1].content[1].type"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}, "input[1].content[0].type"),
        (RESULT | {"output": [IMAGE]}, "input[1].output[0].type"),
        ({"type": "reasoning", "summary": [], "encrypted_content": "x"}, "input[1].encrypted_content"),
        (USER | {"odd": 1}, "input[1].odd"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(item: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedFieldError) as raised:
        messages([USER, item])
    assert raised.value.param == param and raised.value.message.startswith(param)


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "user"}, "input[1].content"),
        ({"content": "x"}, "input[1].role"),
        ({"role": "tool", "content": "x"}, "input[1].role"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[1].call_id"),
        ({"type": "function_call_output", "call_id": "x"}, "input[1].output"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[1].content[0].text"),
        ({"type": "reasoning", "summary": [part("text", "x")]}, "input[1].summary[0]"),
        ("x", "input[1]"),
    ],
)
def test_what_is_wrong_is_named(item: Any, param: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        messages([USER, item])
    assert raised.value.param == param


def test_an_input_has_an_item() -> None:
    for given in ([], 5, None):
        with pytest.raises(InvalidRequestError) as raised:
            messages(given)
        assert raised.value.param == "input"
