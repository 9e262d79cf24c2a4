"""Tools and reasoning in chats, over a worker that says what the test wants it to say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.server.events import read_stream
from tests.server.legs import frames, leg_of, named, payload, stream
from tests.server.live import LiveServer
from tests.support.tool_model import write_tool_model

MODEL = "tool-model"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}
ASK = [{"role": "user", "content": "Is it raining?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
REPLY = f"<think>\nI look.\n</think>\n\nA moment.\n{CALL}\n{CALL.replace('Köln', 'Paris')}"
ARGUMENTS = ['{"city": "Köln"}', '{"city": "Paris"}']


def body(reply: str = REPLY, **fields: Any) -> dict[str, Any]:
    template = {"reply": reply} | fields.pop("template", {})
    return {"model": MODEL, "messages": ASK, "tools": [WEATHER], "chat_template_kwargs": template} | fields


def choice(server: LiveServer, **fields: Any) -> dict[str, Any]:
    answer = server.client.post("/v1/chat/completions", json=body(**fields))
    assert answer.status_code == 200, answer.text
    (found,) = answer.json()["choices"]
    return dict(found)


def test_openais_client_takes_calls_whole_and_streamed_and_sends_them_back(tool_server: LiveServer) -> None:
    client = OpenAI(
        base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    )
    asked: dict[str, Any] = {name: value for name, value in body().items() if name != "chat_template_kwargs"}
    extra = {"extra_body": {"chat_template_kwargs": {"reply": REPLY}}}
    whole = client.chat.completions.create(**asked, **extra)
    (found,) = whole.choices
    message, calls = found.message, found.message.tool_calls
    assert found.finish_reason == "tool_calls" and message.content == "A moment." and calls is not None
    assert [call.function.arguments for call in calls if call.type == "function"] == ARGUMENTS
    assert len({call.id for call in calls}) == 2
    assert message.model_extra is not None and message.model_extra["reasoning_content"] == "I look."
    with client.chat.completions.stream(**asked, **extra) as events:
        events.until_done()
        (streamed,) = events.get_final_completion().choices
    assert streamed.finish_reason == "tool_calls" and streamed.message.content == "A moment."
    assert streamed.message.tool_calls is not None
    assert [call.function.arguments for call in streamed.message.tool_calls] == ARGUMENTS
    assert [call.function.name for call in streamed.message.tool_calls] == ["weather", "weather"]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "It rains."} for call in calls]
    again = client.chat.completions.create(**{**asked, "messages": [*ASK, message, *results]})
    # Without a reply of its own the worker repeats the prompt up to <|im_end|>: the tools.
    assert "".join((again.choices[0].message.content or "").split()).startswith("systemCalltools")


def test_a_stream_gives_text_names_and_arguments_as_they_come(tool_server: LiveServer) -> None:
    *chunks, _ = read_stream(tool_server.client, "/v1/chat/completions", body())
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [set(call) for call in calls if "id" in call] == [{"index", "id", "type", "function"}] * 2
    assert calls[0]["function"]["name"] == "weather" and calls[0]["index"] == 0
    pieces = [call["function"]["arguments"] for call in calls if call["index"] == 0]
    assert "".join(pieces) == ARGUMENTS[0]
    assert all(set(call) == {"index", "function"} for call in calls if "id" not in call)
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == "I look."
    assert "".join(delta.get("content", "") for delta in deltas) == "A moment."
    assert all(delta for delta in deltas[:-1]) and chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("cut_off", [300, 110])
def test_a_stream_goes_on_behind_any_part_of_a_call(tool_server: LiveServer, cut_off: int) -> None:
    """Another engine has the same state of the parser; a call that is cut off by length is part of that."""
    asked = body(stream=True, max_tokens=cut_off, logprobs=True, stream_options={"include_usage": True})
    path = "/v1/chat/completions"
    told = frames(tool_server, leg_of(path, asked))
    expected = stream(payload(told))
    assert b"arguments" in payload(told)
    for count in range(1, len(told), 9):
        after = frames(tool_server, leg_of(path, asked, outputs=named(told[:count])))
        assert stream(payload(told[:count]) + payload(after)) == expected, count


def test_the_usage_counts_the_reasoning_of_choices_that_had_ended_before(tool_server: LiveServer) -> None:
    asked = body("A moment.", n=2, stream=True, stream_options={"include_usage": True})
    told = frames(tool_server, leg_of("/v1/chat/completions", asked))
    expected = stream(payload(told))
    assert b'"completion_tokens_details":{"reasoning_tokens":0}' in payload(told)
    for count in range(1, len(told)):
        after = frames(tool_server, leg_of("/v1/chat/completions", asked, outputs=named(told[:count])))
        assert stream(payload(told[:count]) + payload(after)) == expected, count


def test_what_is_shown_of_reasoning_and_calls_is_asked_for(tool_server: LiveServer) -> None:
    plain = choice(tool_server, separate_reasoning=False, tool_choice="none")
    assert plain["message"] == {"role": "assistant", "content": REPLY} and plain["finish_reason"] == "stop"
    merged = choice(tool_server, reply=f"<think>{CALL}</think>\n{CALL}", separate_reasoning=False)["message"]
    assert merged["content"] == f"<think>{CALL}</think>" and len(merged["tool_calls"]) == 1
    hidden = choice(tool_server, include_reasoning=False, parallel_tool_calls=False)["message"]
    assert "reasoning" not in hidden and "reasoning_content" not in hidden
    assert [call["function"]["arguments"] for call in hidden["tool_calls"]] == ARGUMENTS[:1]
    opened = choice(tool_server, reply="So.</think>Yes", template={"enable_thinking": True})["message"]
    assert (opened["reasoning"], opened["content"]) == ("So.", "Yes")
    *chunks, _ = read_stream(tool_server.client, "/v1/chat/completions", body(stream_reasoning=False))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta["reasoning"] for delta in deltas if "reasoning" in delta] == ["I look."]
    alone = choice(tool_server, reply=CALL)["message"]
    assert alone["content"] is None and len(alone["tool_calls"]) == 1


def test_a_call_that_is_none_is_content(tool_server: LiveServer) -> None:
    for text in (
        "<tool_call>weather()</tool_call>",
        '<tool_call>{"name": "weather", "arguments": {"a": 1,}}',
    ):
        found = choice(tool_server, reply=f"Hm. {text}")
        assert found["message"] == {"role": "assistant", "content": f"Hm. {text}"}
        assert found["finish_reason"] == "stop"
    cut = choice(tool_server, reply=CALL, max_tokens=40)
    assert cut["finish_reason"] == "length" and CALL.startswith(cut["message"]["content"])
    assert "tool_calls" not in cut["message"]
    size = tool_server.client.post("/tokenize", json={"prompt": CALL}).json()["count"]
    whole = choice(tool_server, reply=f"{CALL}\nSo it goes.", max_tokens=size + 4)
    assert whole["finish_reason"] == "length" and len(whole["message"]["tool_calls"]) == 1


def test_tokens_are_counted_of_the_tools_as_a_chat_gives_them(tool_server: LiveServer) -> None:
    many = [WEATHER, {"type": "function", "function": {"name": "other", "description": "x" * 20_000}}]
    for tools in ([WEATHER], many):
        asked = {"messages": ASK, "tools": tools}
        reply = tool_server.client.post("/tokenize", json=asked).json()
        chat = tool_server.client.post("/v1/chat/completions", json=asked | {"max_tokens": 1}).json()
        if tools is many:
            assert f"The prompt has {reply['count']} tokens" in chat["error"]["message"]
        else:
            assert reply["count"] == chat["usage"]["prompt_tokens"]


def test_the_prompt_has_tools_history_and_the_message_that_goes_on(tool_server: LiveServer) -> None:
    def prompt(messages: list[dict[str, Any]], **fields: Any) -> str:
        asked = {"model": MODEL, "messages": messages, **fields}
        answer = tool_server.client.post("/v1/chat/completions/render", json=asked)
        assert answer.status_code == 200, answer.text
        return str(answer.json()[0]["prompt"] if isinstance(answer.json(), list) else answer.json()["prompt"])

    function = {"name": "weather", "arguments": '{"city":"Rome"}'}
    called = {
        "role": "assistant",
        "content": None,
        "reasoning": "Hm.",
        "tool_calls": [{"function": function}],
    }
    result = {"role": "tool", "tool_call_id": "1", "content": "Rain."}
    text = prompt([*ASK, called, result, {"role": "assistant", "content": "It"}], continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nIt")
    assert (
        '<think>Hm.</think><tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>' in text
    )
    assert "<|im_start|>tool\nRain.<|im_end|>" in text
    text = prompt(ASK, tools=[WEATHER], tool_choice="none")
    assert (
        '{"type": "function", "function": {"name": "weather", "description"' in text and "strict" not in text
    )
    assert text.endswith("<|im_start|>assistant\n")
    assert prompt(ASK, add_generation_prompt=False).endswith("raining?<|im_end|>\n")


def messages_body(reply: str = REPLY, **fields: Any) -> dict[str, Any]:
    function = WEATHER["function"]
    tool = {name: function[name] for name in ("name", "description")}
    asked = {"model": MODEL, "messages": ASK, "max_tokens": 1000, "thinking": {"type": "adaptive"}}
    asked |= {"tools": [{**tool, "input_schema": function["parameters"]}]}
    return asked | {"chat_template_kwargs": {"reply": reply}} | fields


def test_messages_have_blocks_and_say_why_they_end(tool_server: LiveServer) -> None:
    def post(*args: Any, **fields: Any) -> dict[str, Any]:
        answer = tool_server.client.post("/v1/messages", json=messages_body(*args, **fields))
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    found = post()
    assert [block["type"] for block in found["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert found["content"][0] == {"type": "thinking", "thinking": "I look.", "signature": ""}
    assert [block["input"]["city"] for block in found["content"][2:]] == ["Köln", "Paris"]
    assert (found["stop_reason"], found["stop_sequence"]) == ("tool_use", None)
    assert found["id"].startswith("msg_") and found["role"] == "assistant" and found["model"] == MODEL
    plain = {"thinking": {"type": "disabled"}}
    assert [block["type"] for block in post(**plain)["content"]] == ["text", "tool_use", "tool_use"]
    one = post(tool_choice={"type": "auto", "disable_parallel_tool_use": True}, **plain)
    assert len(one["content"]) == 2
    for fields, reason, matched, text in (
        ({}, "end_turn", None, "So it goes."),
        ({"stop_sequences": ["it", "x"]}, "stop_sequence", "it", "So "),
        ({"max_tokens": 2}, "max_tokens", None, "So"),
    ):
        ended = post("So it goes.", **fields)
        assert (ended["stop_reason"], ended["stop_sequence"]) == (reason, matched)
        assert ended["content"][0]["text"].startswith(text) and len(ended["content"]) == 1
    long = [{"role": "user", "content": "x " * 700}]
    cut = tool_server.client.post("/v1/messages", json={"messages": long, "max_tokens": 1 << 20}).json()
    assert cut["stop_reason"] == "model_context_window_exceeded"
    assert sum(cut["usage"].get(n, 0) for n in ("input_tokens", "output_tokens")) == 2048


def test_tokens_of_messages_are_counted(tool_server: LiveServer) -> None:
    asked = messages_body("So.")
    usage = tool_server.client.post("/v1/messages", json=asked).json()["usage"]
    del asked["max_tokens"]
    reply = tool_server.client.post("/v1/messages/count_tokens", json=asked).json()
    assert reply == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    many = {"messages": [{"role": "user", "content": "x " * 3000}]}  # more than fit the context
    assert tool_server.client.post("/v1/messages/count_tokens", json=many).json()["input_tokens"] > 3000


@pytest.mark.parametrize("cut_off", [300, 110])
def test_a_stream_of_messages_goes_on_behind_any_part_of_a_block(
    tool_server: LiveServer, cut_off: int
) -> None:
    asked = messages_body(stream=True, max_tokens=cut_off)
    told = frames(tool_server, leg_of("/v1/messages", asked))
    expected = stream(payload(told))
    assert b"input_json_delta" in payload(told) and b"thinking_delta" in payload(told)
    whole = tool_server.client.post("/v1/messages", json=messages_body(max_tokens=cut_off)).json()
    assert expected[0]["stop_reason"] == whole["stop_reason"]
    for count in range(1, len(told), 19):
        after = frames(tool_server, leg_of("/v1/messages", asked, outputs=named(told[:count])))
        assert stream(payload(told[:count]) + payload(after)) == expected, count


def test_large_messages_are_taken_and_checked(tool_server: LiveServer) -> None:
    """Bodies above 16 KiB are decoded field by field, and inputs of calls once their size is known."""
    use: dict[str, Any] = {"type": "tool_use", "id": "1", "name": "weather", "input": {"a": "x" * 20_000}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "Rain."}]}
    asked = messages_body(system=[{"type": "text", "text": "Be brief."}])
    asked["messages"] = [*ASK, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]

    def error() -> Any:
        answer = tool_server.client.post("/v1/messages", json=asked)
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]

    assert error()["code"] == "context_length_exceeded"
    use["input"] = ["x" * 20_000]
    assert error()["param"] == "messages[1].content[0].input"
    use["input"] = {"a": [[]] * 70_000}
    assert "opening brackets" in error()["message"]
    asked["messages"][0] = {"role": "user", "content": [{"type": "image", "source": "x" * 20_000}]}
    assert error()["param"] == "messages[0].content[0].type"
    asked["messages"], asked["tools"] = ASK, [{"name": "f" * 40_000}]
    assert error()["param"].startswith("tools[0]")
    asked["tools"], asked["system"] = [], [{"type": "text", "words": "x" * 20_000}]
    assert error()["param"] == "system[0].words"


@pytest.mark.slow
def test_a_forced_call_is_made_whatever_the_model_would_write(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 23]}}, "required": ["a"]}
    function = {"name": "add", "parameters": schema | {"additionalProperties": False}}
    tools = [WEATHER, {"type": "function", "function": function}]
    named = {"type": "function", "function": {"name": "add"}}
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "reasoning_parser": "none"}
    with LiveServer(write_tool_model(tmp_path / MODEL), real=True, **options) as server:
        for fields in (
            {"tools": tools, "tool_choice": named},
            {"tools": tools[1:], "tool_choice": "required"},
        ):
            asked: dict[str, Any] = {"model": MODEL, "messages": ASK, "parallel_tool_calls": False, **fields}
            answer = server.client.post("/v1/chat/completions", json=asked)
            (found,) = answer.json()["choices"]
            (call,) = found["message"]["tool_calls"]
            assert call["function"]["name"] == "add" and found["finish_reason"] == "tool_calls"
            assert json.loads(call["function"]["arguments"])["a"] in (1, 23)
        both = server.client.post("/v1/chat/completions", json=asked | {"regex": "a"}).json()["error"]
        assert both["param"] == "tool_choice" and "regex" in both["message"]


def test_a_large_list_of_tools_is_taken(tool_server: LiveServer) -> None:
    """Bodies above 16 KiB are decoded field by field."""
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": {"x": ["y" * 60] * 20}}}
        for n in range(20)
    ]
    answer = tool_server.client.post("/v1/chat/completions", json=body(tools=tools))
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    wrong = json.loads(json.dumps(body(tools=tools)))
    wrong["tools"][7]["function"].pop("name")
    error = tool_server.client.post("/v1/chat/completions", json=wrong).json()["error"]
    assert error["param"] == "tools[7].function.name"
