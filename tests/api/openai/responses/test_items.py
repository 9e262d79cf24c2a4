"""Items and events of a response, as a client puts them together."""

from __future__ import annotations

from typing import Any

import pytest

from segue.api.openai.responses.items import OutputItems, settled
from segue.api.parsers.events import Event
from segue.api.parsers.message import MessageFormat, MessageParser

FORM = MessageFormat(tools="hermes", thinks=True)
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TEXT = f"<think>So</think>\nHere: {CALL}\n{CALL}\nDone."


def told(text: str, size: int, *, one_call: bool = False, is_complete: bool = True) -> list[Any]:
    """Returns the events of a stream whose pieces have ``size`` characters."""
    parser, items = MessageParser(FORM), OutputItems("key", one_call=one_call)
    events = []
    for at in range(0, len(text), size):
        events += items.take(parser.push(text[at : at + size]))
    events += items.take(parser.finish())
    return [*events, *items.finish(is_complete=is_complete), items.shown()]


def whole(text: str, *, one_call: bool = False) -> list[dict[str, Any]]:
    items, parser = OutputItems("key", one_call=one_call), MessageParser(FORM)
    items.take(settled([*parser.push(text), *parser.finish()]))
    items.finish(is_complete=True)
    return items.shown()


def put_together(events: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The items that a client makes of deltas alone; checks what the events of the ends say."""
    found: list[dict[str, Any]] = []
    ended = 0
    for name, fields in events:
        assert fields["output_index"] == len(found) - (name != "response.output_item.added")
        if name == "response.output_item.added":
            assert ended == len(found) and fields["item"]["status"] == "in_progress"
            found.append({**fields["item"]})
            continue
        item = found[-1]
        if name == "response.output_item.done":
            ended += 1
            assert fields["item"] == item | {"status": fields["item"]["status"]}
            found[-1] = fields["item"]
            continue
        assert fields["item_id"] == item["id"]
        if name == "response.content_part.added":
            item["content"] = [{**fields["part"]}]
        elif name == "response.content_part.done":
            assert [fields["part"]] == item["content"]
        elif item["type"] == "function_call":
            if name == "response.function_call_arguments.delta":
                item["arguments"] += fields["delta"]
            else:
                assert name == "response.function_call_arguments.done"
                assert (fields["arguments"], fields["name"]) == (item["arguments"], item["name"])
        else:
            text = "response.output_text" if item["type"] == "message" else "response.reasoning_text"
            if name == f"{text}.delta":
                assert fields["delta"]
                item["content"][fields["content_index"]]["text"] += fields["delta"]
            else:
                assert name == f"{text}.done" and fields["text"] == item["content"][0]["text"]
    assert ended == len(found)
    return found


def brief(items: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [
        (item["type"], item["arguments"] if "arguments" in item else item["content"][0]["text"])
        for item in items
    ]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_stream_and_a_whole_reply_have_the_same_items(size: int) -> None:
    *events, shown = told(TEXT, size)
    if size == 1000:  # a piece gives each text at once
        assert sum(name.endswith(".delta") for name, _ in events) == len(shown)
    assert put_together(events) == shown == whole(TEXT)
    calls = [("function_call", '{"a": 1}')] * 2
    assert brief(shown) == [("reasoning", "So"), ("message", "Here:"), *calls, ("message", "Done.")]
    assert {item["status"] for item in shown} == {"completed"}
    ids = [item["id"] for item in shown]
    assert [each.partition("_")[0] for each in ids] == ["rs", "msg", "fc", "fc", "msg"]
    assert len({*ids, *(item.get("call_id") for item in shown)}) == 8  # no call_id of three items
    assert OutputItems("other").take(MessageParser(FORM).push("a"))[0][1]["item"]["id"] not in ids


def test_the_output_ends_with_its_first_call_if_there_may_be_one_only() -> None:
    *events, shown = told(TEXT, 3, one_call=True)
    assert put_together(events) == shown == whole(TEXT, one_call=True)
    assert [item["type"] for item in shown] == ["reasoning", "message", "function_call"]


@pytest.mark.parametrize("text", [CALL.replace("}}", " b"), CALL[:-14]])
def test_a_call_that_breaks_off_is_text_and_only_in_a_stream_a_call_as_well(text: str) -> None:
    assert brief(whole("Hm." + text)) == [("message", "Hm." + text)]
    *events, shown = told("Hm." + text, 1, is_complete=False)
    assert put_together(events) == shown
    given = '{"a": 1 ' if "b" in text else '{"a": 1'
    assert brief(shown)[:2] == [("message", "Hm."), ("function_call", given)]
    assert [item["status"] for item in shown][:2] == ["completed", "incomplete"]
    assert brief(shown)[2:] == ([("message", "b</tool_call>")] if "b" in text else [])


def test_the_item_that_a_reply_ends_within_is_not_complete() -> None:
    *_, shown = told("<think>So</think>Yes", 4, is_complete=False)
    assert [item["status"] for item in shown] == ["completed", "incomplete"]
    items = OutputItems("key")
    nothing: list[Event] = []
    assert items.take(nothing) == [] == items.finish(is_complete=True) == items.shown()
