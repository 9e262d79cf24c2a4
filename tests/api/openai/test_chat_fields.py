"""What tools, reasoning and templates ask of prompt and reply, without a server."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from segue.api.openai.chat_fields import ReplyForm
from segue.api.openai.requests import Wanted, chat_call, parse_chat
from segue.errors import InvalidRequestError, SegueError, UnsupportedFieldError
from segue.frontend.chat_template import ChatForm, ChatTemplate
from segue.frontend.tokenizer import PromptEncoder, ServedModel
from tests.support.tiny_model import TEMPLATE
from tests.support.tool_model import HERMES, LLAMA

ASK = {"role": "user", "content": "Hi"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}, "strict": True}}
MANY_LISTS = '{"a":[' + ",".join(["[]"] * 65_536) + "]}"
ADD_CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [ADD_CALL]}


class Encoder:
    """Keeps what the template is given; the prompt ends with ``end``."""

    def __init__(self, end: str = "") -> None:
        self.given: dict[str, Any] = {}
        self._end = end

    async def render(self, messages: list[dict[str, Any]], **template: Any) -> str:
        self.given = {"messages": messages, **template}
        return f"{messages}{self._end}"


def model(text: str = HERMES, end: str = "", **form: Any) -> ServedModel:
    template = ChatTemplate(text)
    chat = ChatForm(template=template, tools=template.tool_format, thinks=template.has_think)
    return ServedModel(
        names=["m"], max_prompts=9, encoder=cast(PromptEncoder, Encoder(end)), chat=replace(chat, **form)
    )


def call(body: dict[str, Any], served: ServedModel) -> Wanted:
    return asyncio.run(chat_call(parse_chat({"messages": [ASK], **body}), served))


def given(body: dict[str, Any], served: ServedModel | None = None) -> dict[str, Any]:
    """What the template is given."""
    served = served or model()
    call(body, served)
    return cast(Encoder, served.encoder).given


def form(body: dict[str, Any], served: ServedModel | None = None) -> ReplyForm | None:
    return call(body, served or model()).form


def test_templates_tell_how_a_model_writes_calls_and_reasoning() -> None:
    hermes, llama, plain = ChatTemplate(HERMES), ChatTemplate(LLAMA), ChatTemplate(TEMPLATE)
    assert (hermes.tool_format, llama.tool_format, plain.tool_format) == ("hermes", "llama3-json", None)
    assert (hermes.has_think, llama.has_think) == (True, False)
    assert [each.uses("tools") for each in (hermes, llama, plain)] == [True, True, False]
    # Other forms within the same mark.
    assert ChatTemplate("<tool_call><function=f></function></tool_call>{{tools}}").tool_format is None
    assert ChatTemplate.of({"default": "a", "tool_use": "<tool_call>"}).tool_format == "hermes"
    assert ChatTemplate.of(None).text == ""


def test_the_template_gets_tools_calls_and_reasoning_in_its_form() -> None:
    history = [
        ASK,
        CALLED | {"reasoning": "Sum."},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
        {"role": "assistant", "content": "2", "reasoning_content": "So."},
        ASK,
    ]
    found = given({"messages": history, "tools": [ADD], "tool_choice": "auto"})
    function = {"name": "add", "parameters": {"type": "object"}}
    assert found["tools"] == [{"type": "function", "function": function}]
    _, called, result, answer, _ = found["messages"]
    assert called["tool_calls"][0]["function"]["arguments"] == {"a": 1} and called["content"] == ""
    assert called["reasoning"] == called["reasoning_content"] == "Sum."
    assert answer["reasoning"] == answer["reasoning_content"] == "So."
    assert result == {"role": "tool", "content": "2", "tool_call_id": "1"}
    assert set(given({})) == {"messages"}  # nothing is asked of the template


@pytest.mark.parametrize(
    ("body", "template", "expected"),
    [
        ({"reasoning_effort": "low"}, "{{ reasoning_effort }}", {"reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, "{{ enable_thinking }}", {"enable_thinking": False}),
        ({"reasoning_effort": "none"}, "", {}),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "", {"enable_thinking": True}),
        ({"add_generation_prompt": False}, "", {"add_generation_prompt": False}),
        ({"add_generation_prompt": True, "continue_final_message": False}, "", {}),
        (
            {"continue_final_message": True, "messages": [ASK, {"role": "assistant", "content": "So"}]},
            "",
            {"add_generation_prompt": False, "continue_final_message": True},
        ),
    ],
)
def test_arguments_of_the_template(body: dict[str, Any], template: str, expected: dict[str, Any]) -> None:
    found = given(body, model(template))
    del found["messages"]
    assert found == expected


def test_a_reply_is_parsed_for_what_it_may_have() -> None:
    tools = {"tools": [ADD]}
    assert form({}, model(LLAMA)) is None and form({}, model(thinks=False)) is None
    asked = form(tools | {"parallel_tool_calls": False, "include_reasoning": False})
    assert asked is not None and asked.one_call and not asked.has_reasoning
    assert asked.text.tools == "hermes" and asked.text.names == {"add"} and asked.text.thinks
    unasked = form({})
    assert unasked is not None and unasked.text.tools is None and unasked.text.thinks
    assert form(tools | {"tool_choice": "none", "separate_reasoning": False}) is None
    # Calls are looked for behind reasoning also where the client wants it as content.
    for choice in ("auto", "required"):
        merged = form(tools | {"tool_choice": choice, "separate_reasoning": False}, model(end="<think>"))
        assert merged is not None and not merged.text.thinks
        assert merged.text.shows_marks and merged.text.thinking
    # Tools that are not to be used may be given to any model.
    assert form(tools | {"tool_choice": "none"}, model(TEMPLATE)) is None


@pytest.mark.parametrize(
    ("end", "last", "thinking"),
    [
        ("<think>\n", None, True),
        ("<think>\n\n</think>\n\n", None, False),
        ("<think>So", "<think>So", True),
        ("<think>So</think>Yes", "<think>So</think>Yes", False),
        ("Yes", "Yes", False),
    ],
)
def test_the_prompt_may_have_begun_the_reasoning(end: str, last: str | None, thinking: bool) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "What is <think>? " + "a" * 50}]}
    if last is not None:
        body["messages"].append({"role": "assistant", "content": last})
        body["continue_final_message"] = True
    found = form(body, model(end=end))
    assert found is not None and found.text.thinking is thinking


def test_a_forced_call_guides_the_output_and_a_grammar_of_the_client_leaves_no_reasoning() -> None:
    named = {"type": "function", "function": {"name": "add"}}
    sub = {"type": "function", "function": {"name": "sub"}}
    for choice, functions in (("required", ["add", "sub"]), (named, ["add"])):
        (request,) = call({"tools": [sub, ADD], "tool_choice": choice}, model()).requests
        grammar, names = request.options.grammar, request.options.names
        assert grammar is not None and grammar.kind == "grammar" and names["grammar"] == "tool_choice"
        assert [name for name in ("add", "sub") if f'\\"{name}\\"' in grammar.text] == functions
        assert "<think>" in grammar.text and ("call){0,15}" in grammar.text) is (choice == "required")
        assert names["logprobs"] == "top_logprobs"
        with pytest.raises(InvalidRequestError, match="tool_choice and regex both guide") as raised:
            call({"tools": [ADD], "tool_choice": choice, "regex": "a"}, model())
        assert raised.value.param == "tool_choice"
    large = {"name": "f", "parameters": {"type": "object", "description": "é" * 12_000}}
    with pytest.raises(InvalidRequestError, match=r"one of 1 tools .* at most 65536 .* smaller tools"):
        call({"tools": [{"type": "function", "function": large}], "tool_choice": "required"}, model())
    assert form({"regex": "a"}) is None
    guided = form({"regex": "a", "tools": [ADD]}, model(end="<think>"))
    assert guided is not None and not guided.text.thinks and not guided.text.thinking


LAST = "continue_final_message"


@pytest.mark.parametrize(
    ("body", "template", "kind", "param", "words"),
    [
        ({"tools": [ADD]}, TEMPLATE, UnsupportedFieldError, "tools", "no place for tools"),
        ({"tools": [ADD]}, "{{ tools }}", UnsupportedFieldError, "tools", "--tool-call-parser"),
        ({"tools": [ADD, ADD]}, HERMES, InvalidRequestError, "tools[1].function.name", "each its own"),
        ({"tool_choice": "required"}, HERMES, InvalidRequestError, "tool_choice", "needs tools"),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            *(HERMES, InvalidRequestError, "tool_choice", "'sub'"),
        ),
        ({"tools": [ADD], "tool_choice": "any"}, HERMES, InvalidRequestError, "tool_choice", '"required"'),
        ({"tools": [{"type": "web"}]}, HERMES, InvalidRequestError, "tools[0].type", "web"),
        ({"reasoning_effort": "low"}, HERMES, UnsupportedFieldError, "reasoning_effort", "does not use it"),
        ({"reasoning_effort": "none"}, "<think>", UnsupportedFieldError, "reasoning_effort", "not use it"),
        (
            {"chat_template_kwargs": {"tools": 1}},
            HERMES,
            InvalidRequestError,
            "chat_template_kwargs",
            "tools",
        ),
        ({LAST: True}, HERMES, InvalidRequestError, LAST, "role 'user'"),
        ({LAST: True, "messages": [CALLED]}, HERMES, InvalidRequestError, LAST, "has tool calls"),
        ({LAST: True, "add_generation_prompt": True}, HERMES, InvalidRequestError, LAST, "give one"),
        (
            {"messages": [CALLED | {"tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}]},
            *(
                HERMES,
                InvalidRequestError,
                "messages[0].tool_calls[0].function.arguments",
                "JSON of an object",
            ),
        ),
        (
            {"messages": [CALLED | {"tool_calls": [{"function": {"name": "f", "arguments": MANY_LISTS}}]}]},
            HERMES,
            InvalidRequestError,
            "messages[0].tool_calls[0].function.arguments",
            "65538 opening brackets; at most 65536",
        ),
        (
            {"messages": [{"role": "assistant"}]},
            HERMES,
            InvalidRequestError,
            "messages[0].content",
            "required",
        ),
    ],
)
def test_what_cannot_be_is_named(
    body: dict[str, Any], template: str, kind: type[SegueError], param: str, words: str
) -> None:
    with pytest.raises(kind, match=words) as raised:
        call(body, model(template))
    assert raised.value.param == param and type(raised.value) is kind
