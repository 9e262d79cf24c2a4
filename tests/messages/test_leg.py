"""Frames and logprobs of legs survive their way, and logprobs of several frames can be joined."""

from __future__ import annotations

import math

import msgspec
import pytest

from segue.errors import InvalidRequestError
from segue.messages import leg
from segue.messages.leg import Data, End, Frame, LegOutput, pack_frame, pack_logprobs, unpack_logprobs
from segue.messages.requests import TokenLogprob

ENTRIES = [
    TokenLogprob(5, -0.1 / 3, [(5, -0.1 / 3), (9, -2.5)]),
    TokenLogprob(7, -math.inf, []),
    TokenLogprob(1, 0.0, [(1 << 30, -9.0)]),
]
IDS = [entry.token for entry in ENTRIES]


def test_a_frame_begins_with_its_length() -> None:
    for frame in (Data(b"abc", [LegOutput(0, b"1234")]), End(b"")):
        data = pack_frame(frame)
        assert int.from_bytes(data[:4], "big") == len(data) - 4
        assert msgspec.msgpack.decode(data[4:], type=Frame) == frame


def test_a_frame_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leg, "MOST_FRAME_BYTES", 8)
    with pytest.raises(ValueError, match="at most 8 are allowed"):
        pack_frame(End(b"123456789"))


def test_logprobs_of_several_frames_can_be_joined() -> None:
    data = pack_logprobs(ENTRIES[:1]) + pack_logprobs(ENTRIES[1:])
    assert unpack_logprobs(data, IDS) == ENTRIES
    assert unpack_logprobs(b"", []) == []


@pytest.mark.parametrize("cut", range(1, len(pack_logprobs(ENTRIES))))
def test_logprobs_that_were_cut_are_refused(cut: int) -> None:
    with pytest.raises(InvalidRequestError, match="bytes of logprobs are not those of 3 tokens"):
        unpack_logprobs(pack_logprobs(ENTRIES)[:cut], IDS)


def test_logprobs_of_more_tokens_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="are not those of 2 tokens"):
        unpack_logprobs(pack_logprobs(ENTRIES), IDS[:2])
