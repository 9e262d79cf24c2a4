"""Bodies of the Messages API become chats of the same meaning; errors name the client's own fields."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from segue.api.anthropic.call import messages_call
from segue.api.anthropic.requests import explained, parse_count_tokens, parse_messages
from segue.api.openai.requests import Wanted
from segue.errors import InvalidRequestError
from segue.frontend.chat_template import ChatForm, ChatTemplate
from segue.frontend.tokenizer import PromptEncoder, ServedModel
from segue.server import large_messages
from segue.server.json_pieces import AT_ONCE
from segue.server.large_body import decode

RENDERED: list[dict[str, Any]] = []  # what the template got last
TEMPLATE: dict[str, Any] = {}
TOOL = {"name": "weather", "input_schema": {"type": "object"}, "description": "Tells."}
USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Köln"}}


async def render(messages: list[dict[str, Any]], **template: Any) -> str:
    RENDERED[:] = messages
    TEMPLATE.clear()
    TEMPLATE.update(template)
    return "prompt"


def model(template: str = "tools enable_thinking <think>", *, thinks: bool = True) -> ServedModel:
    return ServedModel(
        names=["tiny-model"],
        max_prompts=10,
        encoder=cast(PromptEncoder, SimpleNamespace(render=render)),
        chat=ChatForm(template=ChatTemplate(template), tools="hermes", thinks=thinks),
    )


def asked(body: dict[str, Any], served: ServedModel | None = None) -> Wanted:
    full = {"max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]} | body
    return asyncio.run(messages_call(parse_messages(full), served or model()))


def refused(body: dict[str, Any], served: ServedModel | None = None) -> str:
    """The field that an error names, which its text begins with."""
    with pytest.raises(InvalidRequestError) as caught:
        asked(body, served)
    error = explained(caught.value)
    assert error.param is not None and error.message.startswith(error.param), error.message
    return error.param


def text(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | fields


def test_a_conversation_is_that_of_a_chat() -> None:
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "Rain"}]}
    failed = {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such city", "is_error": True}
    asked(
        {
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                text("user", "Is it raining?"),
                text("user", "In Köln?"),
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "I look.", "signature": "s"},
                        {"type": "text", "text": "A moment."},
                        USE,
                    ],
                },
                {"role": "user", "content": [result, failed, {"type": "text", "text": "Well?"}]},
            ],
            "tools": [TOOL],
        }
    )
    function = {"name": "weather", "arguments": {"city": "Köln"}}
    assert [
        text("system", "Be brief."),
        text("user", "Is it raining?\nIn Köln?"),
        text(
            "assistant",
            "A moment.",
            tool_calls=[{"id": "toolu_1", "type": "function", "function": function}],
            reasoning="I look.",
            reasoning_content="I look.",
        ),
        text("tool", "Rain", tool_call_id="toolu_1"),
        text("tool", "Error: no such city", tool_call_id="toolu_2"),
        text("user", "Well?"),
    ] == RENDERED
    declared = {"name": "weather", "description": "Tells.", "parameters": {"type": "object"}}
    assert TEMPLATE["tools"] == [{"type": "function", "function": declared}]
    assert "continue_final_message" not in TEMPLATE


def test_the_reply_goes_on_with_a_message_that_the_assistant_has_begun() -> None:
    asked({"messages": [text("user", "Hi"), text("assistant", "Well")]})
    assert TEMPLATE["continue_final_message"] is True
    assert (
        refused({"messages": [text("user", "Hi"), {"role": "assistant", "content": [USE]}]}) == "messages[1]"
    )
    assert refused({"messages": [text("user", "Hi"), text("assistant", "")]}) == "messages[1]"


def test_sampling_and_ids() -> None:
    wanted = asked(
        {
            **{"temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop_sequences": ["a", "b"], "stream": True},
            **{"metadata": {"user_id": "u"}, "service_tier": "auto", "priority": 2, "cache_salt": "s"},
        }
    )
    (request,) = wanted.requests
    options = request.options
    assert (options.max_tokens, options.temperature, options.top_p, options.top_k) == (5, 0.5, 0.9, 3)
    assert tuple(options.stop) == ("a", "b") and options.names["stop"] == "stop_sequences"
    assert not options.must_fit, "max_tokens is clamped"
    assert (request.priority, request.cache_salt, wanted.stream) == (2, "s", True)
    assert request.rid == wanted.id and wanted.id.startswith("msg_")


def test_reasoning_is_shown_if_it_was_asked_for() -> None:
    enabled = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}
    for body, thinks, shown in (
        ({}, False, False),
        ({"thinking": {"type": "disabled"}}, False, False),
        ({"thinking": {"type": "adaptive"}}, None, True),
        (enabled, True, True),
    ):
        form = asked(body).form
        assert TEMPLATE.get("enable_thinking") is thinks
        assert form is not None and form.has_reasoning is shown
    asked({}, model("tools <think>"))
    assert "enable_thinking" not in TEMPLATE, "this template does not know it"
    assert asked({"thinking": {"type": "adaptive"}}, model(thinks=False)).form is None
    assert refused(enabled, model(thinks=False)) == "thinking.type"
    assert refused(enabled | {"max_tokens": 1024}) == "thinking.budget_tokens"
    assert refused({"thinking": {"type": "enabled"}}) == "thinking.budget_tokens"


def test_calls_are_forced_or_forbidden_by_the_choice() -> None:
    def grammar(**choice: Any) -> Any:
        wanted = asked({"tools": [TOOL], "tool_choice": choice})
        return wanted.requests[0].options.grammar, wanted.form

    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        spec, form = grammar(**choice)
        assert spec is not None and "weather" in spec.text and not form.one_call
    spec, form = grammar(type="auto", disable_parallel_tool_use=True)
    assert spec is None and form.one_call and form.text.tools == "hermes"
    assert grammar(type="none")[1].text.tools is None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"context_management": {"edits": []}}, "context_management"),
        ({"n": 2}, "n"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0]"),
        ({"system": [{"type": "document"}]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        ({"system": [{"text": "a"}]}, "system[0].type"),
        ({"system": [{"type": "image", "text": "a"}]}, "system[0].type"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(body: dict[str, Any], field: str) -> None:
    assert refused(body) == field


def test_errors_about_arguments_name_the_block_that_has_them() -> None:
    large = USE | {"input": {"a": "x" * (1 << 18)}}
    messages = [
        text("user", "a"),
        {"role": "assistant", "content": [{"type": "text", "text": "b"}, USE, large]},
        text("user", "c"),
    ]
    assert refused({"system": "s", "messages": messages}) == "messages[1].content[2].input"


@pytest.mark.parametrize("value", [b"\xff", b"K\xc3", b"\xed\xa0\x80"])
def test_arguments_that_are_no_utf_8_are_refused_by_name(value: bytes) -> None:
    """A large body is decoded in pieces, and the arguments of its calls only at the end."""
    use = b'{"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "%b"}}' % value
    body = b'{"model": "m", "max_tokens": 5, "messages": [%b, {"role": "assistant", "content": [%b]}]}'
    data = body % (b'{"role": "user", "content": "%b"}' % (b"a" * AT_ONCE), use)
    served = model()
    with pytest.raises(
        InvalidRequestError, match=r"messages\[1\].content\[0\].input: .* valid UTF-8"
    ) as caught:
        asyncio.run(messages_call(parse_messages(decode(data, large_messages.messages(served))), served))
    assert caught.value.param == "messages[1].content[0].input"


def test_a_schema_guides_the_text() -> None:
    schema = {"type": "object", "properties": {}}
    (request,) = asked({"output_config": {"format": {"type": "json_schema", "schema": schema}}}).requests
    assert request.options.grammar is not None
    assert request.options.names["grammar"] == "output_config.format.schema"


def test_tokens_are_counted_of_a_body_without_max_tokens() -> None:
    body = {"messages": [text("user", "Hi")], "system": "Be brief."}
    asyncio.run(messages_call(parse_count_tokens(body), model()))
    assert [text("system", "Be brief."), text("user", "Hi")] == RENDERED
    with pytest.raises(InvalidRequestError, match="max_tokens: this field is not known here"):
        parse_count_tokens(body | {"max_tokens": 1})
