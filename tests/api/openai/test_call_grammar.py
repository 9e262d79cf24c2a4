"""The grammar of forced calls, by what it accepts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer

from segue.api.openai.call_grammar import call_grammar
from segue.api.openai.chat_fields import MAX_TOOLS, Tool
from segue.api.parsers.events import CallBegin
from segue.api.parsers.message import MessageFormat, MessageParser
from segue.frontend.chat_template import ToolFormat
from segue.guided import grammars
from segue.guided.beginning import ByteVocabulary
from segue.messages.guided import GrammarSpec

TOOLS = msgspec.convert(
    [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "parameters": {  # not said to be an object, and with a reference
                    "properties": {"city": {"$ref": "#/$defs/city"}},
                    "required": ["city"],
                    "additionalProperties": False,
                    "$defs": {"city": {"enum": ["Köln", "Rome"]}},
                },
            },
        },
        {"type": "function", "function": {"name": 'a"dd'}},
    ],
    list[Tool],
)
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ADD = '<tool_call>\n{"name": "a\\"dd", "arguments": {"x": [1]}}\n</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city": "Rome"}}'


def accepts(text: str, form: ToolFormat, **how: bool) -> bool:
    grammar = call_grammar(TOOLS, form, **({"several": False, "thinks": False, "thinking": False} | how))
    spec = GrammarSpec("grammar", grammar)
    grammars.check(spec)
    matcher = LLMatcher(LLTokenizer(ByteVocabulary()), grammars.to_llguidance(spec))
    data = list(text.encode())
    return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("text", "form", "how", "expected"),
    [
        (WEATHER, "hermes", {}, True),
        (ADD, "hermes", {}, True),
        (f"{WEATHER}\n{ADD}", "hermes", {}, False),
        (f"{WEATHER}\n{ADD}", "hermes", {"several": True}, True),
        ("\n".join([ADD] * 16), "hermes", {"several": True}, True),
        ("\n".join([ADD] * 17), "hermes", {"several": True}, False),
        (WEATHER.replace("Köln", "Paris"), "hermes", {}, False),
        (WEATHER.replace('{"city": "Köln"}', "{}"), "hermes", {}, False),
        (ADD.replace('{"x": [1]}', "[1]"), "hermes", {}, False),
        (ADD.replace('a\\"dd', "sub"), "hermes", {}, False),
        (f"So. {WEATHER}", "hermes", {}, False),
        ("", "hermes", {"several": True}, False),
        (LLAMA, "llama3-json", {}, True),
        (f"{LLAMA}; {LLAMA}", "llama3-json", {"several": True}, True),
        # Reasoning may come first, or goes on where the prompt has begun it.
        (WEATHER, "hermes", {"thinks": True}, True),
        (f"<think>\nA <b>?\n</think>\n\n{WEATHER}", "hermes", {"thinks": True}, True),
        (f"<think>\nA\n</think> So {WEATHER}", "hermes", {"thinks": True}, False),
        (f"A\n</think>\n\n{WEATHER}", "hermes", {"thinks": True, "thinking": True}, True),
        (WEATHER, "hermes", {"thinks": True, "thinking": True}, False),
    ],
)
def test_only_calls_of_the_tools_are_accepted(
    text: str, form: ToolFormat, how: dict[str, bool], expected: bool
) -> None:
    assert accepts(text, form, **how) is expected
    if expected:  # what is accepted is found
        parser = MessageParser(
            MessageFormat(
                tools=form,
                names=frozenset(tool.function.name for tool in TOOLS),
                thinks=how.get("thinks", False),
                thinking=how.get("thinking", False),
            )
        )
        events: list[Any] = [*parser.push(text), *parser.finish()]
        assert any(isinstance(event, CallBegin) for event in events)


def test_as_many_tools_as_there_may_be_fit_and_a_name_is_written_as_the_prompt_has_it() -> None:
    many = [{"type": "function", "function": {"name": f"número_{index}"}} for index in range(MAX_TOOLS)]
    tools = msgspec.convert(many, list[Tool])
    grammar = call_grammar(tools, "hermes", several=True, thinks=True, thinking=False)
    grammars.check(GrammarSpec("grammar", grammar))
    alone = call_grammar(tools[:1], "hermes", several=False, thinks=False, thinking=False)
    matcher = LLMatcher(LLTokenizer(ByteVocabulary()), grammars.to_llguidance(GrammarSpec("grammar", alone)))
    data = list('<tool_call>\n{"name": "número_0", "arguments": {}}\n</tool_call>'.encode())
    assert matcher.try_consume_tokens(data) == len(data)
