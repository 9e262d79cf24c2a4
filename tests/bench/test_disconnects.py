"""What counts as a complete reply, what of it is compared, and how growth is measured."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from bench.disconnects import SoakLook, draw_request, growth, judged
from bench.leaving_clients import DONE, BrokenReplyError, StreamRequest, content_of, dechunked

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
NATIVE = StreamRequest(path="/generate", body={"text": "a"})
CHOICES = StreamRequest(path="/v1/completions", body={"prompt": "a", "n": 2})
HELD = {"rows": 0, "KV tokens": 0, "problems": 0}


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))


def events(*contents: Any) -> list[bytes]:
    return [b"data: " + json.dumps(content).encode() + b"\n\n" for content in contents]


def native(ids: list[int]) -> dict[str, Any]:
    return {"text": "x" * len(ids), "output_ids": ids, "meta_info": {"id": "drawn", "finish_reason": None}}


def choice(index: int, text: str) -> dict[str, Any]:
    return {"choices": [{"index": index, "text": text, "finish_reason": None}]}


def test_what_a_reply_says_does_not_depend_on_its_parts() -> None:
    whole = content_of(HEAD + chunked(b"".join(events(native([1]), native([1, 2]))) + DONE), NATIVE)
    cut = content_of(HEAD + chunked(*events(native([1, 2])), DONE[:5], DONE[5:]), NATIVE)
    assert whole == cut and whole[0]["output_ids"] == [1, 2] and "id" not in whole[0]["meta_info"]
    orders = [
        [choice(0, "a"), choice(0, "b"), choice(1, "c")],
        [choice(1, "c"), choice(0, "a"), choice(0, "b")],
    ]
    found = [content_of(HEAD + chunked(*events(*order), DONE), CHOICES) for order in orders]
    assert found[0] == found[1] and [each["text"] for each in found[0]] == ["ab", "c"]
    other = content_of(HEAD + chunked(*events(choice(0, "ab"), choice(1, "d")), DONE), CHOICES)
    assert other != found[0]


@pytest.mark.parametrize(
    "data",
    [
        HEAD + chunked(*events(native([1])), DONE)[:-5],
        HEAD + chunked(*events(native([1])), DONE)[:-20],
        HEAD + chunked(*events(native([1])), DONE) + b"0\r\n\r\n",
        HEAD + chunked(*events(native([1]))),
        HEAD + chunked(*events(native([1])), DONE, DONE),
        HEAD + chunked(*events({"object": "error", "message": "no"}), DONE),
        HEAD + chunked(*events(native([1]), {"error": {"message": "no"}}), DONE),
        HEAD + chunked(DONE),
        HEAD.replace(b"200", b"503") + chunked(*events(native([1])), DONE),
        b"",
    ],
)
def test_a_reply_that_is_not_complete_is_a_fault(data: bytes) -> None:
    with pytest.raises(BrokenReplyError):
        content_of(data, NATIVE)


def test_chunks_are_joined() -> None:
    assert dechunked(chunked(b"a" * 300, b"\r\n0\r\n")) == b"a" * 300 + b"\r\n0\r\n"


def looks(rise: float) -> list[SoakLook]:
    return [
        SoakLook(at_s=float(at), rss_mib=[100.0, 300.0 + rise * at / 600], running=0, waiting=0)
        for at in range(0, 601, 5)
    ]


def test_growth_is_that_behind_the_warm_up() -> None:
    first, last = growth(looks(60.0))
    assert first == [100.0, pytest.approx(307.5)] and last == [100.0, pytest.approx(358.5)]
    short = [look for look in looks(0.0) if look.at_s <= 30]
    assert growth(short) == ([100.0, 300.0], [100.0, 300.0])


def test_every_bar_that_is_missed_is_named() -> None:
    memory = [100.0, 300.0]
    assert judged([], HELD, memory, [100.0, 319.0], num_tracebacks=0) == []
    for faults, held, end, tracebacks in (
        (["a fault"], HELD, memory, 0),
        ([], HELD | {"rows": 1}, memory, 0),
        ([], HELD, [100.0, 321.0], 0),
        ([], HELD, memory, 1),
    ):
        assert len(judged(faults, held, memory, end, num_tracebacks=tracebacks)) == 1


def test_a_seed_draws_the_same_requests() -> None:
    drawn = [[draw_request(Random(seed), 5) for _ in range(5)] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
