"""Frames that come in pieces."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.messages.leg import MOST_FRAME_BYTES, Data, End, Frame, LegFailed, LegOutput, pack_frame
from segue.router.frames import FrameError, LegReader

FRAMES: list[Frame] = [
    Data(b"data: 1\n\n", [LegOutput(0, b"\1\0\0\0", b"", b"")]),
    Data(b"", []),
    Data(b"x" * 300, [LegOutput(1, b"", b"", b"end")]),
    End(b"data: [DONE]\n\n"),
]
BYTES = b"".join(pack_frame(frame) for frame in FRAMES)


def test_all_frames_of_a_piece_are_returned_at_once() -> None:
    assert LegReader().feed(BYTES) == FRAMES


def test_a_frame_that_is_cut_at_any_byte_is_not_seen_before_its_rest_has_come() -> None:
    ends = [len(b"".join(pack_frame(frame) for frame in FRAMES[: n + 1])) for n in range(len(FRAMES))]
    for cut in range(len(BYTES)):
        reader, whole = LegReader(), sum(end <= cut for end in ends)
        assert reader.feed(BYTES[:cut]) == FRAMES[:whole]
        assert reader.feed(BYTES[cut:]) == FRAMES[whole:]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, len(BYTES)), max_size=20))
def test_any_pieces_give_the_same_frames(cuts: list[int]) -> None:
    reader, frames, at = LegReader(), [], 0
    for cut in [*sorted(cuts), len(BYTES)]:
        frames += reader.feed(BYTES[at:cut])
        at = cut
    assert frames == FRAMES


def test_a_failure_is_a_frame() -> None:
    failed = LegFailed(503, "kv_peer_lost", True, b"{}")
    assert LegReader().feed(pack_frame(failed)) == [failed]


def test_a_frame_over_the_limit_is_refused_by_its_length() -> None:
    with pytest.raises(FrameError, match=f"at most {MOST_FRAME_BYTES} are allowed"):
        LegReader().feed((MOST_FRAME_BYTES + 1).to_bytes(4, "big"))


@pytest.mark.parametrize("body", [b"\xc1", b"\x93\x09\xc0\xc0", b"HTTP/1.1 200 OK"])
def test_what_is_no_frame_is_refused(body: bytes) -> None:
    with pytest.raises(FrameError, match="use the same version of Segue"):
        LegReader().feed(len(body).to_bytes(4, "big") + body)


def test_a_large_frame_in_many_pieces_is_not_joined_again_and_again() -> None:
    """Joining at each piece would copy 64 MiB 512 times on average, which takes seconds."""
    frame = End(bytes(64 << 20))
    data, piece = pack_frame(frame), 1 << 16
    reader, began = LegReader(), time.thread_time()
    frames = [each for at in range(0, len(data), piece) for each in reader.feed(data[at : at + piece])]
    assert frames == [frame] and time.thread_time() - began < 2
