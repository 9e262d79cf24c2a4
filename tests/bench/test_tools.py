"""What is put together from the deltas of calls, and what counts as a fault of them."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from bench.tools import StreamedChoice, ToolPrompt, draw_prompt, faults_of_calls, faults_of_choices

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("add", "sub")]
FIRST = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "add", "arguments": ""}}


def streamed(*deltas: dict[str, Any], reason: str = "tool_calls") -> StreamedChoice:
    choice = StreamedChoice()
    for delta in deltas:
        choice.take({"delta": delta, "finish_reason": None})
    choice.take({"delta": {}, "finish_reason": reason})
    return choice


def part(text: str, index: int = 0) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def call(index: int, name: str = "add", call_id: str = "") -> dict[str, Any]:
    more = {"index": index, "id": call_id or f"call-{index}", "function": {"name": name, "arguments": ""}}
    return {"tool_calls": [FIRST | more]}


def test_calls_are_put_together_from_their_deltas() -> None:
    reply = streamed(call(0), part('{"n"'), part(": 1}"), call(1, "sub"), part('{"n": 2}', 1))
    assert [(each.names, each.arguments) for each in reply.calls.values()] == [
        (["add"], '{"n": 1}'),
        (["sub"], '{"n": 2}'),
    ]
    assert faults_of_calls(reply, ToolPrompt(text="", tools=TOOLS, named=None)) == []


@pytest.mark.parametrize(
    ("reply", "named", "fault"),
    [
        (streamed(call(0), part('{"n": 1')), None, "with '{\"n\": 1'"),
        (streamed(call(0), part('{"n": "1"}')), None, "by {"),
        (streamed(call(0, "mul"), part('{"n": 1}')), None, "calls ['mul']"),
        (streamed(call(0), part('{"n": 1}')), "sub", "may call ['sub']"),
        (streamed(call(0), part('{"n": 1}'), call(1), part('{"n": 1}', 1)), "add", "has 2 calls"),
        (streamed(call(0), part('{"n": 1}'), reason="length"), None, "ended with ['length']"),
        (streamed(call(0), part('{"n": 1}'), reason="stop"), None, "ended with ['stop']"),
        (streamed({"content": "So"}, call(0), part('{"n": 1}')), None, "content 'So'"),
        (streamed(call(1), part('{"n": 1}', 1)), None, "indices [1]"),
        (streamed(), None, "indices []"),
        (streamed(call(0), call(0), part('{"n": 1}')), None, "calls ['add', 'add']"),
        (
            streamed(call(0, call_id="a"), part("{}"), call(1, call_id="a"), part("{}", 1)),
            None,
            "with the ids",
        ),
    ],
)
def test_every_fault_of_a_call_is_found(reply: StreamedChoice, named: str | None, fault: str) -> None:
    found = faults_of_calls(reply, ToolPrompt(text="", tools=TOOLS, named=named))
    assert any(fault in each for each in found), found


def test_every_fault_of_a_choice_is_found() -> None:
    right = streamed({"content": '{"n":'}, {"content": " 1}"}, reason="stop")
    assert faults_of_choices([right, right], SCHEMA, 2) == []
    for wrong in (
        streamed({"content": '{"n": 1}'}, reason="length"),
        streamed({"content": '{"n": '}, reason="stop"),
        streamed({"content": '{"n": null}'}, reason="stop"),
        streamed({"content": '{"n": 1}'}, call(0), reason="stop"),
    ):
        assert faults_of_choices([right, wrong], SCHEMA, 2)
    assert faults_of_choices([right], SCHEMA, 2)


def test_prompts_differ_and_half_of_them_name_a_tool() -> None:
    rng = Random(0)
    prompts = [draw_prompt(rng, number) for number in range(100)]
    assert len({prompt.text for prompt in prompts}) == 100
    assert sum(prompt.named is not None for prompt in prompts) == 50
    for prompt in prompts:
        names = [tool["function"]["name"] for tool in prompt.tools]
        assert len({*names}) == len(names) > 1 and {*prompt.callable_schemas} <= {*names}
