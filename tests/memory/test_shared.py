"""Shared memory has a fixed size, its descriptor travels over a socket, and a pidfd tells who has ended."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from segue.errors import SharedMemoryError
from segue.memory import shared
from tests.conftest import WaitUntil

SIZE = 3 * mmap.PAGESIZE
CONNECT = """
import socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1])
connection.recv(1)
"""


@pytest.fixture
def descriptor() -> Iterator[int]:
    number = shared.create(SIZE)
    yield number
    os.close(number)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        yield one, other


@pytest.fixture
def connected(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """A process and a socket whose other end it has."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        process = subprocess.Popen([sys.executable, "-c", CONNECT, str(tmp_path / "socket")])
        connection, _ = listener.accept()
        with connection:
            yield process, connection
        process.kill()
        process.wait()


def without_peer_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "SO_PEERPIDFD", 12345)  # as before Linux 6.5: the option is not known


def with_peer_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    pass


both_ways = pytest.mark.parametrize("way", [with_peer_pidfd, without_peer_pidfd])
Way = Callable[[pytest.MonkeyPatch], None]


def test_all_mappings_have_the_same_bytes(descriptor: int) -> None:
    one, other = shared.map_shared(descriptor, SIZE), shared.map_shared(descriptor, SIZE)
    numbers, tensor = np.frombuffer(one, np.uint8), torch.frombuffer(other, dtype=torch.uint8)
    assert len(numbers) == SIZE and not numbers.any()
    tensor[5] = 7
    assert numbers[5] == 7


def test_the_size_cannot_change(descriptor: int) -> None:
    for size in (SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_memory_of_another_size_is_not_mapped(descriptor: int) -> None:
    with pytest.raises(SharedMemoryError, match=f"has {SIZE} bytes .* must have {SIZE + 1} bytes"):
        shared.map_shared(descriptor, SIZE + 1)


def test_memory_that_can_shrink_is_not_mapped() -> None:
    descriptor = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SIZE)
    with pytest.raises(SharedMemoryError, match="cannot shrink"):
        shared.map_shared(descriptor, SIZE)
    os.close(descriptor)


def test_a_descriptor_of_something_else_is_not_mapped(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(SharedMemoryError, match=r"pass one of `shared\.create`"):
        shared.map_shared(pair[0].fileno(), SIZE)


def test_memory_is_mapped_on_a_kernel_without_huge_pages(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345)  # madvise raises EINVAL
    assert len(shared.map_shared(descriptor, SIZE)) == SIZE


def test_a_forked_child_has_no_mapping(descriptor: int) -> None:
    memory = shared.map_shared(descriptor, SIZE)
    start = np.frombuffer(memory, np.uint8).ctypes.data
    flags = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith(f"{start:x}-"):
            flags = "of this mapping"
        elif flags == "of this mapping" and line.startswith("VmFlags"):
            flags = line
    assert " dc " in f"{flags} "  # do not copy on fork


def test_a_descriptor_that_is_sent_is_of_the_same_memory(
    descriptor: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    shared.send_descriptor(pair[0], b"here", descriptor)
    message, received = shared.receive_descriptor(pair[1], 100)
    assert message == b"here" and received is not None
    assert not os.get_inheritable(received)
    shared.map_shared(descriptor, SIZE)[0] = 9
    assert shared.map_shared(received, SIZE)[0] == 9
    os.close(received)


def test_a_message_may_come_without_a_descriptor(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].send(b"no")
    assert shared.receive_descriptor(pair[1], 100) == (b"no", None)
    pair[0].close()
    assert shared.receive_descriptor(pair[1], 100) == (b"", None)


def test_surplus_descriptors_are_closed(descriptor: int, pair: tuple[socket.socket, socket.socket]) -> None:
    socket.send_fds(pair[0], [b"three"], [descriptor] * 3)
    before = set(os.listdir("/proc/self/fd"))
    _, received = shared.receive_descriptor(pair[1], 100)
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1
    assert received is not None
    os.close(received)


def test_an_end_that_is_closed_is_noticed_behind_unread_messages(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    pair[0].send(b"last")
    assert not shared.is_closed(pair[1])
    pair[0].close()
    assert shared.is_closed(pair[1])


@both_ways
def test_the_process_at_the_other_end_is_known(
    way: Way, monkeypatch: pytest.MonkeyPatch, connected: tuple[subprocess.Popen[bytes], socket.socket]
) -> None:
    way(monkeypatch)
    process, connection = connected
    peer = shared.peer_process(connection)
    assert (peer.pid, peer.uid) == (process.pid, os.geteuid())
    assert not peer.has_ended and not os.get_inheritable(peer.pidfd)
    os.close(peer.pidfd)


@both_ways
def test_a_process_has_ended_when_it_is_killed_and_not_when_it_is_stopped(
    way: Way,
    monkeypatch: pytest.MonkeyPatch,
    connected: tuple[subprocess.Popen[bytes], socket.socket],
    wait_until: WaitUntil,
) -> None:
    way(monkeypatch)
    process, connection = connected
    peer = shared.peer_process(connection)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert not peer.has_ended
    process.kill()
    wait_until(lambda: peer.has_ended, what="the end of the process")
    os.close(peer.pidfd)


def test_a_process_that_has_ended_is_not_mistaken_for_another_one(
    monkeypatch: pytest.MonkeyPatch, connected: tuple[subprocess.Popen[bytes], socket.socket]
) -> None:
    without_peer_pidfd(monkeypatch)
    process, connection = connected
    process.kill()
    process.wait()
    # As if another process had got the pid.
    monkeypatch.setattr(os, "pidfd_open", lambda pid, original=os.pidfd_open: original(os.getpid()))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SharedMemoryError, match=f"process {process.pid} .* cannot be watched"):
        shared.peer_process(connection)
    assert len(os.listdir("/proc/self/fd")) == before
