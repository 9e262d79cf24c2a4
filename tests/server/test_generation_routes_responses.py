"""``/v1/responses``: items, tools and reasoning, over a worker that says what the test wants it to say."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.server.legs import frames, leg_of, named, named_events, payload
from tests.server.live import LiveServer

PATH, MODEL = "/v1/responses", "tool-model"
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "additionalProperties": False,
    },
    "strict": True,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
REPLY = f"<think>\nI look.\n</think>\n\nA moment.\n{CALL}\n{CALL.replace('Köln', 'Paris')}"
ARGUMENTS = ['{"city": "Köln"}', '{"city": "Paris"}']
KINDS = ["reasoning", "message", "function_call", "function_call"]


def body(reply: str = REPLY, **fields: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "input": "Is it raining?", "tools": [WEATHER]}
    return asked | {"chat_template_kwargs": {"reply": reply}} | fields


def post(server: LiveServer, **fields: Any) -> httpx.Response:
    return server.client.post(PATH, json=body(**fields))


def events(server: LiveServer, **fields: Any) -> list[dict[str, Any]]:
    answer = post(server, stream=True, **fields)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    return named_events(answer.content)


def essence(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what is its own: ids and the time."""
    without = ("id", "call_id", "created_at")
    shown = {name: value for name, value in response.items() if name not in (*without, "usage")}
    items = [{name: value for name, value in each.items() if name not in without} for each in shown["output"]]
    return shown | {"output": items}


@pytest.fixture
def client(tool_server: LiveServer) -> OpenAI:
    options: dict[str, Any] = {"base_url": f"{tool_server.url}/v1", "api_key": "none", "max_retries": 0}
    return OpenAI(**options, _strict_response_validation=True)


def test_openais_client_takes_items_whole_and_streamed_and_sends_them_back(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "Is it raining?", "tools": [WEATHER]}
    extra = {"extra_body": {"chat_template_kwargs": {"reply": REPLY}}}
    whole = client.responses.create(**asked, **extra)
    assert [item.type for item in whole.output] == KINDS and whole.output_text == "A moment."
    calls = [item for item in whole.output if item.type == "function_call"]
    assert [call.arguments for call in calls] == ARGUMENTS and len({call.call_id for call in calls}) == 2
    thought = whole.output[0]
    assert thought.type == "reasoning" and thought.content and thought.content[0].text == "I look."
    assert whole.usage is not None and whole.usage.total_tokens > whole.usage.output_tokens > 0
    *_, last = list(client.responses.create(**asked, **extra, stream=True))
    assert last.type == "response.completed"
    with client.responses.stream(**asked, **extra) as stream:
        final = stream.until_done().get_final_response()
    for other in (last.response, final):
        assert [item.type for item in other.output] == KINDS and other.output_text == "A moment."
    parsed = [item.parsed_arguments for item in final.output if item.type == "function_call"]
    assert parsed == [{"city": "Köln"}, {"city": "Paris"}]
    results: list[Any] = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."} for call in calls
    ]
    question: Any = {"role": "user", "content": [{"type": "input_text", "text": "Is it raining?"}]}
    again = client.responses.create(model=MODEL, input=[question, *whole.output, *results], tools=[WEATHER])
    # Without a reply of its own the worker repeats the prompt up to <|im_end|>: the tools.
    assert "".join(again.output_text.split()).startswith("systemCalltools")


def test_openais_client_parses_what_a_schema_describes(client: OpenAI) -> None:
    class Place(BaseModel):
        city: str

    extra = {"extra_body": {"chat_template_kwargs": {"reply": '{"city": "Köln"}'}}}
    found = client.responses.parse(model=MODEL, input="Where?", text_format=Place, **extra)
    assert found.output_parsed == Place(city="Köln") and found.text is not None
    assert found.text.format is not None and found.text.format.type == "json_schema"


def test_the_end_of_a_stream_has_what_a_whole_reply_has(tool_server: LiveServer) -> None:
    for fields in ({}, {"parallel_tool_calls": False}, {"tool_choice": "none"}, {"max_output_tokens": 120}):
        whole, *_, last = post(tool_server, **fields).json(), *events(tool_server, **fields)
        streamed = last["response"]
        assert essence(streamed) == essence(whole) and last["type"] == f"response.{whole['status']}"
        assert streamed["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_a_stream_goes_on_behind_any_token_to_the_byte(tool_server: LiveServer) -> None:
    """Another engine counts the same events, and makes the same ids, also of a call that is cut off."""
    for most, step in ((300, 40), (110, 30)):
        asked = body(stream=True, max_output_tokens=most)
        told = frames(tool_server, leg_of(PATH, asked))
        events = named_events(payload(told))
        assert {event["type"] for event in events} >= {"response.function_call_arguments.delta"}
        for count in range(1, len(told), step):
            after = frames(tool_server, leg_of(PATH, asked, outputs=named(told[:count])))
            found = named_events(payload(told[:count]) + payload(after))
            found[-1]["response"].pop("usage"), events[-1]["response"].pop("usage", None)
            assert found == events, count


def test_a_pair_of_legs_or_a_whole_reply_has_the_ids_of_the_leg(tool_server: LiveServer) -> None:
    told = frames(tool_server, leg_of(PATH, body(), id="resp_7"))
    (last,) = [json.loads(frame.payload) for frame in told if frame.payload]
    streamed = named_events(payload(frames(tool_server, leg_of(PATH, body(stream=True), id="resp_7"))))
    assert last["id"] == "resp_7" and last["output"] == streamed[-1]["response"]["output"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"max_output_tokens": 4000}, "max_output_tokens", "context_length_exceeded"),
        ({"input": "x" * 3000}, "input", "context_length_exceeded"),
        ({"top_p": 2}, "top_p", "invalid_value"),
        (
            {"tools": [], "text": {"format": {"type": "json_schema", "name": "n", "schema": {"not": {}}}}},
            "text.format.schema",
            "invalid_value",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"max_tokens": 4}, "max_tokens", "unsupported_parameter"),
        ({"stream": True, "instructions": 5}, "instructions", "invalid_value"),
    ],
)
def test_errors_name_the_fields_of_the_body(
    tool_server: LiveServer, fields: dict[str, Any], param: str, code: str
) -> None:
    answer = post(tool_server, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error
    assert set(error) == {"message", "type", "param", "code"}
