"""Anthropic's own client against a server whose model says what it is told.

    python anthropic_client.py URL MODEL KEY

The server wants KEY. Every reply is checked against the client's types.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import anthropic
from anthropic import Anthropic, AsyncAnthropic

URL, MODEL, KEY = sys.argv[1:4]
OPTIONS: dict[str, Any] = {"base_url": URL, "max_retries": 0, "timeout": 60}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "%s"}}</tool_call>'
REPLY = f"<think>I look.</think>A moment.\n{CALL % 'Köln'}\n{CALL % 'Rome'}"
TOOL: Any = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ASK: Any = {"role": "user", "content": [{"type": "text", "text": "Is it raining?"}]}
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "messages": [ASK], "system": "Be brief."}
client = Anthropic(**OPTIONS, api_key=KEY, _strict_response_validation=True)


def says(reply: str, **fields: Any) -> dict[str, Any]:
    """What the model says, and fields of the body that this version of the client has no name for."""
    return {"extra_body": {"chat_template_kwargs": {"reply": reply}} | fields}


def whole() -> None:
    found = client.messages.create(**BODY, **says("It rains.", temperature=0, top_p=0.9, top_k=5))
    (block,) = found.content
    assert block.type == "text" and block.text == "It rains." and found.stop_reason == "end_turn"
    assert found.model == MODEL and found.role == "assistant" and found.usage.output_tokens > 0
    stopped = client.messages.create(**BODY, **says("It rains."), stop_sequences=["rain"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "rain")
    cut = client.messages.create(**BODY | {"max_tokens": 1}, **says("It rains."))
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 1


def streamed() -> None:
    with client.messages.stream(**BODY, **says("It rains.")) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == stream.get_final_text() == "It rains." and final.stop_reason == "end_turn"
    again = client.messages.create(**BODY, **says("It rains."))
    total = [use.input_tokens + (use.cache_read_input_tokens or 0) for use in (final.usage, again.usage)]
    assert total[0] == total[1] and final.usage.output_tokens == again.usage.output_tokens
    events = list(client.messages.create(**BODY, **says("It rains."), stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def tools() -> None:
    asked: dict[str, Any] = {**BODY, "tools": [TOOL], "thinking": {"type": "adaptive"}, **says(REPLY)}
    message = client.messages.create(**asked)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.stop_reason == "tool_use"
    with client.messages.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    assert {"text", "thinking", "signature", "input_json", "content_block_stop"} <= kinds
    plain = [
        [block.model_dump(exclude={"id"}, exclude_none=True) for block in each.content]
        for each in (message, final)
    ]
    assert plain[0] == plain[1] and final.stop_reason == "tool_use"
    calls = [block for block in message.content if block.type == "tool_use"]
    assert [call.input for call in calls] == [{"city": "Köln"}, {"city": "Rome"}]
    assert len({call.id for call in calls}) == 2
    result = {"type": "tool_result", "content": "It rains.", "is_error": False}
    results: Any = [result | {"tool_use_id": call.id} for call in calls]
    history: Any = [ASK, {"role": "assistant", "content": message.content}]
    history.append({"role": "user", "content": results})
    body = asked | {"messages": history} | says("It rains in both.")
    answer = client.messages.create(**body)
    assert answer.stop_reason == "end_turn" and answer.content[-1].type == "text"
    one: Any = {"type": "auto", "disable_parallel_tool_use": True}
    alone = client.messages.create(**asked, tool_choice=one)
    assert [block.type for block in alone.content] == ["thinking", "text", "tool_use"]


def counted() -> None:
    asked = {name: value for name, value in BODY.items() if name != "max_tokens"}
    count = client.messages.count_tokens(**asked, tools=[TOOL]).input_tokens
    usage = client.messages.create(**BODY, tools=[TOOL]).usage
    assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def failing(kind: type[anthropic.APIStatusError], name: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except kind as error:
        body: Any = error.body
        assert body["type"] == "error" and body["error"]["type"] == name, body
    else:
        raise AssertionError(f"no {kind.__name__}")


def errors() -> None:
    create = client.messages.create
    image: Any = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
    asks: Any = [{"role": "user", "content": [image]}]
    bad, invalid = anthropic.BadRequestError, "invalid_request_error"
    failing(bad, invalid, lambda: create(**BODY | {"messages": asks}))
    failing(bad, invalid, lambda: create(**BODY, **says("No.", temperature=2)))
    failing(bad, invalid, lambda: create(**BODY | {"messages": [], "stream": True}))
    failing(anthropic.NotFoundError, "not_found_error", lambda: create(**BODY | {"model": "other"}))
    denied = anthropic.AuthenticationError, "authentication_error"
    stranger = Anthropic(**OPTIONS, api_key="wrong")
    failing(*denied, lambda: stranger.messages.create(**BODY))
    failing(*denied, lambda: create(**BODY, extra_headers={"Authorization": "Bearer another"}))
    by_bearer = Anthropic(**OPTIONS, auth_token=KEY)
    assert by_bearer.messages.create(**BODY, **says("Yes.")).stop_reason == "end_turn"


async def many() -> None:
    async with AsyncAnthropic(**OPTIONS, api_key=KEY) as http:

        async def one(number: int) -> None:
            async with http.messages.stream(**BODY, **says(f"Number {number}.")) as stream:
                assert await stream.get_final_text() == f"Number {number}."

        await asyncio.gather(*map(one, range(8)))


for check in (whole, streamed, tools, counted, errors):
    check()
asyncio.run(many())
print("all done")
