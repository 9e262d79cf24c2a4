"""A message whole, and the deltas of a stream, which a client puts together."""

from __future__ import annotations

from typing import Any

import pytest

from segue.api.openai.chat_fields import ReplyForm
from segue.api.openai.chat_text import PIECE_CHARS, MessageStream, WholeMessage, num_reasoning_tokens
from segue.api.parsers.message import MessageFormat
from segue.frontend.detokenizer import Detokenizer, TokenTable

FORM = ReplyForm(text=MessageFormat(tools="hermes", thinks=True))
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
MARKED = [b"a", b"<think>", b"\xe2\x82", b"</think>", b"<|im_end|>"]


def put_together(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream, as clients build it; ids are random."""
    message: dict[str, Any] = {}
    for delta in deltas:
        for name in ("content", "reasoning", "reasoning_content"):
            if name in delta:
                assert delta[name]
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                assert call["id"].startswith("call_") and call["type"] == "function"
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"]["arguments"]
    return message


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_stream_and_a_whole_message_say_the_same(size: int) -> None:
    text = f"<think>So</think>\nHere: {CALL}\n{CALL}" + "b" * PIECE_CHARS
    message = WholeMessage(FORM, text).fields()
    stream = MessageStream(FORM)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    deltas = [stream.delta(piece) for piece in pieces] + [stream.delta("", is_last=True)]
    num_with_calls = sum("tool_calls" in delta for delta in deltas)
    assert num_with_calls == 16 if size == 1 else num_with_calls > 0  # a name comes with the first bracket
    calls = [list(call["function"].values()) for call in message["tool_calls"]]
    expected = {name: message[name] for name in ("content", "reasoning", "reasoning_content")}
    assert put_together(deltas) == expected | {"tool_calls": calls}
    assert calls == [["f", '{"a": 1}']] * 2 and stream.has_call and stream.has_reasoned


def test_a_stream_goes_on_behind_what_the_client_has() -> None:
    text = f"<think>So</think>\nHere: {CALL} {CALL}"
    for form in (FORM, ReplyForm(text=FORM.text, streams_reasoning=False)):
        whole = put_together([MessageStream(form).delta(text, is_last=True)])
        for cut in range(len(text)):
            first = MessageStream(form)
            second = MessageStream(form, text[:cut])
            deltas = [first.delta(text[:cut]), second.delta(text[cut:], is_last=True)]
            assert put_together(deltas) == whole, text[:cut]


def test_a_call_that_breaks_off_is_text_and_only_in_a_stream_a_call_as_well() -> None:
    text = CALL.replace("}}", " b")
    assert WholeMessage(FORM, text).fields() == {"role": "assistant", "content": text}
    stream = MessageStream(FORM)
    found = put_together([stream.delta(letter) for letter in text] + [stream.delta("", is_last=True)])
    assert found == {"tool_calls": [["f", '{"a": 1 ']], "content": "b</tool_call>"}
    assert not stream.has_call


def test_reasoning_tokens_are_those_up_to_the_mark() -> None:
    table = TokenTable(MARKED, special_ids=(1, 3, 4))
    assert num_reasoning_tokens([1, 0, 0, 3, 0], True, table) == 4
    assert num_reasoning_tokens([1, 0, 0], True, table) == 3
    assert num_reasoning_tokens([0, 3], False, table) == 0
    assert num_reasoning_tokens([0, 0], True, TokenTable([b"a"])) is None


def test_marks_that_are_special_tokens_are_kept_where_they_are_read() -> None:
    table = TokenTable(MARKED, special_ids=(1, 3, 4))
    ids = [1, 0, 2, 3, 0, 4]
    plain, marked = Detokenizer(table), Detokenizer(table, keeps_marks=True)
    assert "".join(map(plain.push, ids)).replace("\ufffd", "") == "aa"
    assert "".join(map(marked.push, ids)).replace("\ufffd", "") == "<think>a</think>a"
    assert table.marked is not table.visible and TokenTable([b"a"]).marks == {}
