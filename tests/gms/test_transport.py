"""Messages and descriptors between two ends of a socket."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Iterator

import pytest

from segue.gms.messages import MAX_DESCRIPTORS, MAX_FRAME
from segue.gms.transport import GmsFrameError, close, packed, receive, send, unpacked


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        yield one, other


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_messages_keep_their_borders_and_descriptors(ends: tuple[socket.socket, socket.socket]) -> None:
    given = packed(b"contents")
    send(ends[0], b"first", [given] * MAX_DESCRIPTORS)
    send(ends[0], b"x" * MAX_FRAME)
    frame, descriptors = receive(ends[1])
    assert frame == b"first" and len(descriptors) == MAX_DESCRIPTORS
    assert all(unpacked(descriptor) == b"contents" for descriptor in descriptors)
    assert not any(os.get_inheritable(descriptor) for descriptor in descriptors)
    assert receive(ends[1]) == (b"x" * MAX_FRAME, [])
    close([given, *descriptors])


def test_a_message_over_the_limit_is_refused(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].send(b"x" * (MAX_FRAME + 1))
    with pytest.raises(GmsFrameError, match="over the limit"):
        receive(ends[1])


def test_more_descriptors_than_allowed_are_refused_and_none_is_left(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    before = num_descriptors()
    rights = array.array("i", [0] * (MAX_DESCRIPTORS + 1))
    ends[0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    with pytest.raises(GmsFrameError, match="over the limit"):
        receive(ends[1])
    assert num_descriptors() == before


def test_only_memfds_of_an_allowed_size_are_read() -> None:
    reading, writing = os.pipe()
    large = packed(b"x" * 11)
    with pytest.raises(GmsFrameError, match="not one of a memfd"):
        unpacked(reading)  # would block otherwise
    with pytest.raises(GmsFrameError, match="at most 10"):
        unpacked(large, 10)
    close([reading, writing, large])
