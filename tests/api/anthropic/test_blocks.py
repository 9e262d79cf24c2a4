"""The blocks of a reply, whole, and from the events of a stream as a client puts them together."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from segue.api.anthropic.blocks import PLAIN, BlockStream, WholeBlocks
from segue.api.openai.chat_fields import ReplyForm
from segue.api.parsers.message import MessageFormat

FORM = ReplyForm(text=MessageFormat(tools="hermes", thinks=True))
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TEXT = f"<think>So</think>\nHere: {CALL}\n{CALL} Behind."
BLOCKS = [
    {"type": "thinking", "thinking": "So", "signature": ""},
    {"type": "text", "text": "Here:"},
    {"type": "tool_use", "name": "f", "input": '{"a": 1}'},
    {"type": "tool_use", "name": "f", "input": '{"a": 1}'},
    {"type": "text", "text": "Behind."},
]
DELTAS = {
    "text_delta": ("text", "text"),
    "thinking_delta": ("thinking", "thinking"),
    "signature_delta": ("signature", "signature"),
    "input_json_delta": ("partial_json", "input"),
}


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks of a stream, as clients build them; ids are random."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events:
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert index == len(blocks) and not is_open
                blocks.append(dict(block))
                if block["type"] == "tool_use":
                    assert blocks[-1].pop("id").startswith("toolu_") and block["input"] == {}
                    blocks[-1]["input"] = ""
                is_open = True
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                assert index == len(blocks) - 1 and is_open
                source, target = DELTAS[delta["type"]]
                blocks[-1][target] += delta[source]
            case {"type": "content_block_stop", "index": index}:
                assert index == len(blocks) - 1 and is_open
                is_open = False
            case _:
                raise AssertionError(event)
    assert not is_open
    return blocks


def whole(form: ReplyForm, text: str) -> list[dict[str, Any]]:
    found = msgspec.json.decode(msgspec.json.encode(WholeBlocks(form, text).content))
    for block in found:
        if block["type"] == "tool_use":
            assert block.pop("id").startswith("toolu_")
            block["input"] = msgspec.json.encode(block["input"]).decode().replace(":", ": ")
    return list(found)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_stream_has_the_blocks_of_the_whole_reply(size: int) -> None:
    stream = BlockStream(FORM)
    events = [event for at in range(0, len(TEXT), size) for event in stream.push(TEXT[at : at + size])]
    events += stream.push("", is_last=True)
    assert put_together(events) == whole(FORM, TEXT) == BLOCKS
    assert stream.has_call and stream.has_reasoned
    kinds = [event["delta"]["type"] for event in events if "delta" in event]
    assert kinds.index("signature_delta") < kinds.index("text_delta")


def test_a_stream_goes_on_behind_what_the_client_has() -> None:
    for cut in range(len(TEXT)):
        first, second = BlockStream(FORM), BlockStream(FORM, TEXT[:cut])
        events = first.push(TEXT[:cut]) + second.push(TEXT[cut:], is_last=True)
        assert put_together(events) == BLOCKS, TEXT[:cut]


def test_a_reply_ends_with_its_first_call_if_only_one_is_wanted() -> None:
    form = ReplyForm(text=FORM.text, one_call=True)
    stream = BlockStream(form)
    assert put_together(stream.push(TEXT) + stream.push(" More.", is_last=True)) == BLOCKS[:3]
    assert whole(form, TEXT) == BLOCKS[:3]


def test_reasoning_that_is_not_shown_leaves_no_block() -> None:
    form = ReplyForm(text=FORM.text, has_reasoning=False)
    stream = BlockStream(form)
    assert put_together(stream.push(TEXT, is_last=True)) == whole(form, TEXT) == BLOCKS[1:]
    assert stream.has_reasoned


@pytest.mark.parametrize("end", ["", "}, oh}"])
def test_a_call_that_is_not_complete_is_text_unless_it_was_streamed_already(end: str) -> None:
    cut = 'Hm. <tool_call>{"name": "f", "arguments": {"a": 1' + end
    assert whole(FORM, cut) == [{"type": "text", "text": cut}]
    stream = BlockStream(FORM)
    events = [event for character in cut for event in stream.push(character)]
    said, called, *rest = put_together(events + stream.push("", is_last=True))
    assert said["text"] == "Hm." and called["name"] == "f" and called["input"].startswith('{"a": 1')
    assert "".join(block["text"] for block in rest) == cut.partition(called["input"])[2]
    assert bool(rest) == bool(end) and not stream.has_call


def test_a_text_without_parts_is_one_block_and_an_empty_one_is_none() -> None:
    assert whole(PLAIN, TEXT) == put_together(BlockStream(PLAIN).push(TEXT, is_last=True))
    assert whole(PLAIN, TEXT) == [{"type": "text", "text": TEXT}]
    assert whole(PLAIN, "") == BlockStream(PLAIN).push("", is_last=True) == []
