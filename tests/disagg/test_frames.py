"""A stream of bytes is cut into frames, whatever the pieces, and frames over their limits are named."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.disagg.frames import FrameReader, decode, encode, frame, printable
from segue.errors import KVProtocolError
from segue.messages.kv import (
    MAX_LARGE_MESSAGE_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_REASON,
    Bye,
    Claim,
    First,
    Gone,
    Grant,
    KVMessage,
    Ping,
    Proof,
)

GRANT = Grant(handoff=2**63 - 1, lease=3, first_page=4, pages=b"\1\0\0\0")


@pytest.mark.parametrize(
    "message",
    [
        GRANT,
        Claim(handoff=1, rid="r", num_tokens=3, prompt_hash=b"h"),
        Gone(handoff=1, lease=2, reason="expired"),
        Ping(step=1, busy=True),
        Bye("late"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_survives_its_frame(message: KVMessage) -> None:
    (body,) = FrameReader().feed(encode(message))
    assert decode(body) == message


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(1, 50)))
def test_frames_come_out_whole_however_the_stream_is_cut(bodies: list[bytes], sizes: list[int]) -> None:
    stream = b"".join(frame(body) for body in bodies)
    reader, found = FrameReader(), []
    for size in [*sizes, len(stream)]:
        found += list(reader.feed(stream[:size]))
        stream = stream[size:]
    assert found == bodies
    assert reader.num_pending == 0


def test_the_reader_tells_how_much_of_a_frame_has_come() -> None:
    reader = FrameReader()
    assert list(reader.feed(encode(GRANT)[:-1])) == []
    assert reader.num_pending == len(encode(GRANT)) - 1


def test_an_announced_frame_over_the_limit_is_refused_behind_the_frames_before_it() -> None:
    reader, found = FrameReader(), []
    with pytest.raises(
        KVProtocolError,
        match=f"a frame of 4194305 bytes is announced; the limit is {MAX_LARGE_MESSAGE_BYTES}",
    ):
        for body in reader.feed(frame(b"x") + frame(b"y") + struct.pack("<I", MAX_LARGE_MESSAGE_BYTES + 1)):
            found.append(body)
    assert found == [b"x", b"y"]


def test_a_frame_of_the_largest_size_passes() -> None:
    (body,) = FrameReader().feed(frame(bytes(MAX_LARGE_MESSAGE_BYTES)))
    assert len(body) == MAX_LARGE_MESSAGE_BYTES


@pytest.mark.parametrize(
    ("message", "limit"),
    [
        (Claim(handoff=1, rid="r", num_tokens=3, prompt_hash=bytes(MAX_MESSAGE_BYTES)), MAX_MESSAGE_BYTES),
        (
            Grant(handoff=1, lease=1, first_page=0, pages=bytes(MAX_LARGE_MESSAGE_BYTES)),
            MAX_LARGE_MESSAGE_BYTES,
        ),
    ],
    ids=["Claim", "Grant"],
)
def test_a_message_over_the_limit_of_its_type_is_refused_by_both_sides(
    message: KVMessage, limit: int
) -> None:
    body = msgspec.msgpack.encode(message)
    text = f"{type(message).__name__} has {len(body)} bytes; its limit is {limit}"
    with pytest.raises(KVProtocolError, match=text):
        encode(message)
    with pytest.raises(KVProtocolError, match=text):
        decode(body)


def test_a_grant_may_be_larger_than_other_messages() -> None:
    large = Grant(handoff=1, lease=1, first_page=0, pages=bytes(2 * MAX_MESSAGE_BYTES))
    assert decode(msgspec.msgpack.encode(large)) == large


def test_a_message_of_the_handshake_is_none_of_those_behind_it() -> None:
    with pytest.raises(KVProtocolError, match=r"is no message \(Expected `array`, got `object`\)"):
        decode(msgspec.msgpack.encode(Proof(b"")))


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_named_as_none(body: bytes) -> None:
    try:
        decode(body)
    except KVProtocolError as error:
        assert f"a frame of {len(body)} bytes is no message" in error.message


@settings(deadline=None)
@given(st.data())
def test_any_change_of_a_message_gives_a_message_or_is_named(data: st.DataObject) -> None:
    body = bytearray(msgspec.msgpack.encode(GRANT))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(body[: data.draw(st.integers(0, len(body)))]))
    except KVProtocolError as error:
        assert "is no message" in error.message


@pytest.mark.parametrize(
    "body",
    [
        b"\x94\xa8Logprobs\x01\x00\xdd\xff\xff\xff\xff\x00",  # announces 4 billion entries
        b"\x95\xa4Ping" + b"\x91" * 1_000_000,  # nested a million times
        b"\x96\xa4Ping\x01\xc3\x02" + b"\x91" * 1_000_000,  # and in a field that would be skipped
        b"\x92\xa3Bye\xa2\xff\xfe",  # no UTF-8
        b"\x91\xda\xff\xff" + b"a" * 65535,  # a type with a very long name
    ],
    ids=["huge list", "nested", "nested and skipped", "text", "type"],
)
def test_malicious_bytes_are_named_briefly(body: bytes) -> None:
    with pytest.raises(KVProtocolError, match="is no message") as caught:
        decode(body)
    assert len(caught.value.message) < MAX_REASON + 200


def test_text_of_the_other_side_is_made_fit_for_a_log() -> None:
    assert printable("a\nb\x1b[0m\u2028é") == "a?b?[0m?é"
    assert len(printable("x" * 100_000)) == MAX_REASON


def test_a_seed_that_no_device_could_take_is_no_message() -> None:
    message = First(handoff=1, token=5, version="0", cached_tokens=0, seed=1 << 63)
    with pytest.raises(KVProtocolError, match="int"):
        decode(encode(message)[4:])
