"""A router's side of legs: sends them, reads frames, and joins what frames have named."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec

from segue.messages.leg import LEG_CONTENT, LEG_PATH, Data, End, Frame, Leg, LegFailed, LegOutput
from tests.server.live import LiveServer

_decode = msgspec.msgpack.Decoder(Frame).decode
# Of meta_info: a time, what a cache has, and the versions of which a later leg knows only its own.
_DIFFERS = (
    *("e2e_latency", "cached_tokens", "weight_versions"),
    *("prompt_tokens_details", "input_tokens_details"),
)


def leg_of(path: str, body: dict[str, Any], **fields: Any) -> Leg:
    """Returns a leg; those of one test differ in ``fields`` only."""
    fields = {"kind": "whole", "id": "leg-1", "created": 1_700_000_000, "seed": 77} | fields
    return Leg(path=path, body=json.dumps(body).encode(), **fields)


def post(server: LiveServer, leg: Leg) -> httpx.Response:
    return server.client.post(LEG_PATH, content=msgspec.msgpack.encode(leg))


@contextmanager
def reading(server: LiveServer, leg: Leg) -> Iterator[Iterator[Frame]]:
    """Yields the frames of a leg as they come; leaving the block closes the connection."""
    content = msgspec.msgpack.encode(leg)
    with server.client.stream("POST", LEG_PATH, content=content) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == LEG_CONTENT
        yield _frames(response.iter_bytes())


def frames(server: LiveServer, leg: Leg) -> list[Frame]:
    """Returns all frames of a leg."""
    with reading(server, leg) as found:
        return list(found)


def _frames(chunks: Iterator[bytes]) -> Iterator[Frame]:
    data = b""
    for chunk in chunks:
        data += chunk
        while len(data) >= 4 and len(data) >= 4 + (size := int.from_bytes(data[:4], "big")):
            yield _decode(data[4 : 4 + size])
            data = data[4 + size :]
    assert not data, "the reply ends within a frame"


def payload(frames: Iterable[Frame]) -> bytes:
    return b"".join(frame.payload for frame in frames)


def named(frames: Iterable[Frame], before: Iterable[LegOutput] = ()) -> list[LegOutput]:
    """Returns the outputs of the next leg, after one that had ``before`` and gave these frames."""
    joined = {output.index: output for output in before}
    for frame in frames:
        for more in frame.outputs if isinstance(frame, Data) else []:
            one = joined.get(more.index, LegOutput(more.index))
            assert not one.end, "nothing is named behind the end"
            ids, logprobs = one.ids + more.ids, one.logprobs + more.logprobs
            joined[more.index] = LegOutput(more.index, ids, logprobs, more.end)
    return list(joined.values())


def whole_body(frames: list[Frame]) -> Any:
    """Returns the body of a reply that is not a stream, without what may differ from leg to leg."""
    assert isinstance(frames[-1], End)
    assert payload(frames[:-1]) == b""
    return _comparable(json.loads(frames[-1].payload))


def failure(frames: list[Frame]) -> LegFailed:
    assert isinstance(frames[-1], LegFailed)
    return frames[-1]


# --- streams ---


def stream(data: bytes) -> Any:
    """Returns what a stream says, however its tokens were spread over events.

    Asserts that what may come only once does so: roles, ends, the usage, the end mark.
    """
    *blocks, rest = data.decode().split("\n\n")
    assert rest == ""
    if blocks[0].startswith("event: "):
        is_response = "response.created" in blocks[0]
        return [_comparable(event) for event in named_events(data)] if is_response else _messages(blocks)
    texts = [block.removeprefix("data: ") for block in blocks]
    assert texts.index("[DONE]") == len(texts) - 1
    events = [json.loads(text) for text in texts[:-1]]
    return _openai(events) if "choices" in events[0] else _native(events)


def named_events(data: bytes) -> list[dict[str, Any]]:
    """Returns the events of a response; asserts that their numbers have no gap, and that one of them ends it.

    Each token has events of its own, so these do not depend on when the tokens came.
    """
    found: list[dict[str, Any]] = []
    for block in data.decode().removesuffix("\n\n").split("\n\n"):
        name, text = block.split("\n")
        found.append(json.loads(text.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    ends = [f"response.{name}" for name in ("completed", "incomplete", "failed")]
    assert [event["type"] in ends for event in found] == [False] * (len(found) - 1) + [True]
    return found


def _messages(blocks: list[str]) -> Any:
    """Returns what a stream of `/v1/messages` says: the message that a client puts together."""
    start, *events, stop = [json.loads(block.partition("\ndata: ")[2]) for block in blocks]
    names = [block.partition("\n")[0].removeprefix("event: ") for block in blocks]
    assert names == [event["type"] for event in (start, *events, stop)]
    assert (start["type"], stop) == ("message_start", {"type": "message_stop"})
    content: list[dict[str, Any]] = []
    *of_blocks, last = events
    is_open = False
    for event in of_blocks:
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert not is_open and index == len(content)
                content.append({name: value for name, value in block.items() if name != "id"})
                is_open = True
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                assert is_open and index == len(content) - 1
                for name in delta.keys() - {"type"}:
                    content[-1][name] = content[-1].get(name, "") + delta[name]
            case {"type": "content_block_stop", "index": index}:
                assert is_open and index == len(content) - 1
                is_open = False
            case _:
                raise AssertionError(event)
    assert not is_open and last["type"] == "message_delta" and start["message"]["content"] == []
    return start["message"] | last["delta"] | {"usage": _comparable(last["usage"])}, content


def _native(events: list[dict[str, Any]]) -> Any:
    last: dict[int, Any] = {}
    for event in events:
        index = event.get("index", 0)
        if (before := last.get(index)) is not None:
            assert before["meta_info"]["finish_reason"] is None, "nothing comes behind the end"
            assert event["text"].startswith(before["text"])
            count = len(before["output_ids"])
            assert event["output_ids"][:count] == before["output_ids"]
        last[index] = event
    return {index: _comparable(event) for index, event in last.items()}


def _openai(events: list[dict[str, Any]]) -> Any:
    heads, usages, choices = set(), [], dict[int, dict[str, Any]]()
    for event in events:
        names = ("id", "object", "created", "model")  # a reply of token ids has an id of another name
        heads.add(tuple(event[name] for name in names) if "id" in event else event["request_id"])
        if event.get("usage"):
            assert event is events[-1] and event["choices"] == []
            usages.append(_comparable(event["usage"]))
        for choice in event["choices"]:
            found = choices.setdefault(
                choice["index"],
                {
                    **{"text": "", "reasoning": "", "calls": [], "logprobs": [], "roles": 0, "end": None},
                    **{"ids": [], "prompts": 0},
                },
            )
            assert found["end"] is None, "nothing comes behind the end"
            delta = choice.get("delta", {})
            if "role" in delta:
                assert found["text"] == ""
                found["roles"] += 1
            found["text"] += delta.get("content", "") + choice.get("text", "")
            found["reasoning"] += delta.get("reasoning", "")
            for call in delta.get("tool_calls", []):
                if "id" in call:  # of its first part only; ids are random
                    assert call["index"] == len(found["calls"]) and call["type"] == "function"
                    found["calls"].append({"name": call["function"]["name"], "arguments": ""})
                found["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            found["end"] = choice["finish_reason"]
            found["logprobs"] += _logprobs(choice["logprobs"])
            found["ids"] += choice.get("token_ids") or []
            found["prompts"] += "prompt_token_ids" in event | choice
    assert len(heads) == 1 and all(found["prompts"] <= 1 for found in choices.values())
    return heads, usages, choices


def _logprobs(given: dict[str, Any] | None) -> list[Any]:
    """Returns an entry per token, of chat or of completions."""
    if given is None:
        return []
    if "content" in given:
        return list(given["content"])
    return list(zip(*(given[name] for name in sorted(given)), strict=True))


def _comparable(reply: Any) -> Any:
    if isinstance(reply, list):
        return [_comparable(each) for each in reply]
    if isinstance(reply, dict):
        if (cached := reply.get("cache_read_input_tokens")) is not None:
            reply = reply | {"input_tokens": reply["input_tokens"] + cached, "cache_read_input_tokens": 0}
        return {
            name: _comparable(value)
            for name, value in reply.items()
            if name not in (*_DIFFERS, "prompt_tokens_details")
        }
    return reply
