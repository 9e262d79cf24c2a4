"""Peers that break the protocol, stop reading, stop running or die. Other connections go on meanwhile."""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec
import pytest

from segue.disagg import frames, link
from segue.disagg.handshake import LinkSide, sign
from segue.messages.kv import Bye, Claim, Gone, Grant, Hello, Ping, PromptLogprobs, Proof
from segue.messages.kv_link import LinkClosed, LinkMessage, LinkOpened
from tests.conftest import WaitUntil
from tests.support.child import start_child
from tests.support.kv_hello import hello
from tests.support.kv_links import KEY, BarePeer, Worker, connect

LOOPBACK = "127.0.0.1:0"
CLAIM = Claim(handoff=1, rid="r", num_tokens=1, prompt_hash=b"h")

# Connects to an address, and says how the connection ended, once its standard input has ended.
REMOTE = """
import sys
from tests.support.kv_links import Worker
with Worker("decode") as worker:
    peer = worker.links.connect(sys.argv[1])
    sys.stdin.read()
    print(worker.closed(peer).code)
"""
# Has two workers that are connected to each other.
BOTH = """
import sys
from segue.messages.kv import Claim
from segue.messages.kv_link import LinkClosed, LinkMessage
from tests.support.kv_links import Worker, connect
with Worker("prefill", "127.0.0.1:0", silence_s=0.1) as first, Worker("decode", silence_s=0.1) as second:
    ours, theirs = connect(second, first)
    print("connected", flush=True)
    sys.stdin.readline()
    second.links.send(ours, Claim(handoff=1, rid="r", num_tokens=1, prompt_hash=b"h"))
    first.wait(LinkMessage, lambda event: isinstance(event.message, Claim))
    print([event.reason for event in first.events + second.events if isinstance(event, LinkClosed)])
"""


@contextmanager
def program(text: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", text, *arguments]
    with start_child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def silence(closed: LinkClosed) -> float:
    """The seconds that a lost peer has been silent, as the reason names them."""
    found = re.search(r"has been silent for (\d+\.\d) s", closed.reason)
    assert found is not None, closed.reason
    return float(found[1])


@contextmanager
def opened(victim: Worker) -> Iterator[tuple[BarePeer, int]]:
    """A bare peer whose connection is open, and the victim's number of it."""
    seen = {event.peer for event in victim.events if isinstance(event, LinkOpened)}
    with BarePeer(victim.address) as peer:
        peer.shake_hands()
        yield peer, victim.wait(LinkOpened, lambda event: event.peer not in seen).peer


def goes_on(first: Worker, second: Worker, pair: tuple[int, int]) -> None:
    """The connection still carries messages; ``pair`` is what :func:`connect` returned."""
    before = len(first.messages(pair[1]))
    second.links.send(pair[0], CLAIM)
    deadline = time.monotonic() + 60
    while len(first.messages(pair[1])) == before:
        assert time.monotonic() < deadline, "the message did not arrive"
        time.sleep(0.001)


# --- frames ---


@pytest.mark.parametrize("is_open", [False, True], ids=["before", "after"])
def test_a_frame_over_the_limit_is_named_with_size_and_limit(is_open: bool) -> None:
    with Worker("prefill", LOOPBACK) as victim, BarePeer(victim.address) as peer:
        if is_open:
            peer.shake_hands()
        else:
            peer.body()
        peer.sock.sendall(struct.pack("<I", (4 << 20) + 1) + bytes(1 << 20))
        assert "a frame of 4194305 bytes is announced; the limit is 4194304" in peer.messages()[-1].reason
        if is_open:
            assert victim.wait(LinkClosed).code == "kv_protocol"


@pytest.mark.parametrize(
    "message",
    [
        msgspec.structs.replace(CLAIM, prompt_hash=bytes(1 << 20)),
        PromptLogprobs(handoff=1, part=0, entries=[(0.5, [])] * 200_000),
        Bye("x" * 513),
        Ping(step="late", busy=True),  # type: ignore[arg-type]
        Gone(handoff=1, lease="second", reason="expired"),  # type: ignore[arg-type]
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_that_breaks_its_type_ends_the_connection_with_a_named_error(message: object) -> None:
    size = len(msgspec.msgpack.encode(message))
    with Worker("prefill", LOOPBACK) as victim, opened(victim) as (peer, number):
        peer.send(CLAIM, message, CLAIM)
        closed = victim.closed(number)
        assert closed.code == "kv_protocol"
        assert f"{size} bytes" in closed.reason
        assert victim.messages(number) == [CLAIM]
        assert peer.messages()[-1] == Bye(closed.reason)


def test_a_grant_over_the_limit_of_all_frames_is_refused() -> None:
    grant = Grant(handoff=1, lease=1, first_page=0, pages=bytes(4 << 20))
    with Worker("prefill", LOOPBACK) as victim, opened(victim) as (peer, number):
        peer.sock.sendall(frames.frame(msgspec.msgpack.encode(grant)))
        assert "is announced; the limit is 4194304" in victim.closed(number).reason


def test_a_frame_that_is_cut_off_is_named_with_its_length() -> None:
    with Worker("prefill", LOOPBACK) as victim, opened(victim) as (peer, number):
        peer.sock.sendall(frames.encode(CLAIM)[:9])
        peer.sock.close()
        closed = victim.closed(number)
        assert closed.code == "kv_link_lost"
        assert "closed the connection without a reason, 9 bytes into a frame" in closed.reason


def test_a_message_in_single_bytes_arrives() -> None:
    with Worker("prefill", LOOPBACK) as victim, opened(victim) as (peer, number):
        peer.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in frames.encode(CLAIM):
            peer.sock.sendall(bytes([byte]))
        assert victim.wait(LinkMessage) == LinkMessage(number, CLAIM)


@pytest.mark.parametrize("is_open", [False, True], ids=["before", "after"])
def test_garbage_ends_its_connection_alone(is_open: bool) -> None:
    draw = random.Random(7)
    bodies = [msgspec.msgpack.encode(message) for message in (CLAIM, hello("decode"), Bye("x"))]
    with Worker("prefill", LOOPBACK) as victim, Worker("decode") as worker:
        pair = connect(worker, victim)
        for _ in range(150):
            with BarePeer(victim.address) as peer:
                if is_open:
                    peer.shake_hands()
                garbage = draw.randbytes(draw.randrange(1, 60))
                if draw.random() < 0.7:  # a frame whose contents are wrong
                    body = bytearray(draw.choice(bodies))
                    for _ in range(draw.randrange(1, 9)):
                        body[draw.randrange(len(body))] = draw.randrange(256)
                    garbage = frames.frame(bytes(body))
                peer.sock.sendall(garbage)
                peer.sock.shutdown(socket.SHUT_WR)
                while peer.sock.recv(65536):
                    pass
        goes_on(victim, worker, pair)
        closed = [event for event in victim.events if isinstance(event, LinkClosed)]
        assert len(closed) == (150 if is_open else 0)
        assert {event.code for event in closed} <= {"kv_protocol", "kv_link_lost", "kv_link"}
        assert all(event.reason for event in closed)


# --- silence ---


def test_a_peer_that_does_not_answer_is_lost_after_three_pings() -> None:
    with Worker("prefill", LOOPBACK, silence_s=0.1) as victim, opened(victim) as (peer, number):
        closed = victim.closed(number)
        assert closed.code == "kv_link_lost"
        assert silence(closed) >= 0.4
        assert "has not answered 3 pings" in closed.reason
        assert [type(message) for message in peer.messages()] == [Ping, Ping, Ping]


def test_a_peer_that_reads_nothing_is_lost_though_it_writes() -> None:
    with Worker("prefill", LOOPBACK, silence_s=0.1) as victim, opened(victim) as (peer, number):
        stop = threading.Event()

        def ping() -> None:
            with suppress(ConnectionError):  # once the victim has closed it
                while not stop.wait(0.02):
                    peer.send(CLAIM)

        writer = threading.Thread(target=ping)
        writer.start()
        for _ in range(12):  # more than the sockets keep, and less than the limit
            victim.links.send(number, Grant(handoff=1, lease=1, first_page=0, pages=bytes(1 << 20)))
        try:
            closed = victim.closed(number)
        finally:
            stop.set()
            writer.join()
        assert closed.code == "kv_link_lost"
        assert "has read nothing for 0.4 s, and " in closed.reason


def test_a_peer_that_reads_slowly_is_not_lost() -> None:
    with Worker("prefill", LOOPBACK, silence_s=0.25) as victim, opened(victim) as (peer, number):
        for _ in range(14):
            victim.links.send(number, Grant(handoff=1, lease=1, first_page=0, pages=bytes(1 << 20)))
        count, began = 0, time.monotonic()
        while count < 14 << 20:
            count += len(peer.sock.recv(256 << 10, socket.MSG_WAITALL))
            peer.send(CLAIM)
            time.sleep(0.03)
        assert time.monotonic() - began > 1.0  # longer than a peer may read nothing
        assert not [event for event in victim.events if isinstance(event, LinkClosed)]


def test_more_than_the_limit_waits_for_no_peer() -> None:
    with Worker("prefill", LOOPBACK, silence_s=60) as victim, Worker("decode") as worker:
        pair = connect(worker, victim)
        with opened(victim) as (_, number):
            for _ in range(40):
                victim.links.send(number, Grant(handoff=1, lease=1, first_page=0, pages=bytes(1 << 20)))
            closed = victim.closed(number)
            assert closed.code == "kv_link_lost"
            assert f"reads too slowly: over {link.MAX_QUEUED_BYTES} bytes" in closed.reason
        goes_on(victim, worker, pair)


def test_a_process_that_is_stopped_is_lost_and_learns_of_it() -> None:
    with Worker("prefill", LOOPBACK, silence_s=0.2) as victim, Worker("decode", silence_s=0.1) as worker:
        pair = connect(worker, victim)
        with program(REMOTE, victim.address) as process:
            number = victim.wait(LinkOpened, lambda event: event.peer != pair[1], timeout=60).peer
            os.kill(process.pid, signal.SIGSTOP)
            closed = victim.closed(number, timeout=60)
            assert silence(closed) >= 0.8
            assert (closed.code, "has not answered 3 pings" in closed.reason) == ("kv_link_lost", True)
            goes_on(victim, worker, pair)
            os.kill(process.pid, signal.SIGCONT)
            assert process.communicate(timeout=60)[0] == "kv_link_lost\n"


def test_a_process_that_is_killed_is_lost_at_once() -> None:
    with Worker("prefill", LOOPBACK, silence_s=60) as victim, program(REMOTE, victim.address) as process:
        number = victim.wait(LinkOpened, timeout=60).peer
        process.kill()
        closed = victim.closed(number, timeout=60)  # its silence would be noticed after four minutes
        assert closed.code == "kv_link_lost"


def test_a_process_that_was_stopped_itself_blames_nobody() -> None:
    with program(BOTH) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "connected\n"
        os.kill(process.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 1.5  # almost four times what a silent peer is given
        while time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGCONT)
        output, _ = process.communicate("go on\n", timeout=20)
        assert output == "[]\n"


def test_a_worker_that_was_busy_itself_reads_before_it_gives_up() -> None:
    with Worker("prefill", LOOPBACK, handshake_s=1.0) as victim, BarePeer(victim.address) as peer:
        first, second = msgspec.msgpack.encode(hello("decode")), peer.body()
        is_busy, go_on = threading.Event(), threading.Event()

        def slow() -> Hello:
            is_busy.set()
            go_on.wait(60)
            return victim.hello

        victim.make_hello = slow
        with BarePeer(victim.address):
            assert is_busy.wait(60)
            peer.sock.sendall(frames.frame(first))
            peer.send(Proof(sign(KEY, LinkSide.CONNECTING, first, second)))
            deadline = time.monotonic() + 1.2  # longer than the handshake may take
            while time.monotonic() < deadline:
                time.sleep(0.05)
            go_on.set()
            assert msgspec.msgpack.decode(peer.body(), type=Proof)


# --- the own process ---


def test_without_descriptors_a_worker_waits_and_then_accepts(
    caplog: pytest.LogCaptureFixture, wait_until: WaitUntil
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    with (
        Worker("prefill", LOOPBACK, silence_s=60, handshake_s=0.5) as victim,
        Worker("decode", silence_s=60) as worker,
        socket.socket() as client,
        BarePeer(victim.address),  # the deadline of its handshake comes before the next try to accept
    ):
        pair = connect(worker, victim)
        host, _, port = victim.address.rpartition(":")
        client.settimeout(60)
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 10, hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                while True:
                    taken.append(os.dup(client.fileno()))
            client.connect((host, int(port)))
            wait_until(lambda: "raise the limit of open files" in caplog.text)
            busy = time.process_time()
            goes_on(victim, worker, pair)
            assert time.process_time() - busy < 0.5
            assert caplog.text.count("raise the limit of open files") == 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in taken:
                os.close(descriptor)
        assert client.recv(4)  # the beginning of its Hello


def test_a_connection_that_ends_at_once_is_no_problem() -> None:
    with Worker("prefill", LOOPBACK) as victim, Worker("decode") as worker:
        pair = connect(worker, victim)
        for _ in range(50):
            with BarePeer(victim.address) as peer:
                peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
        goes_on(victim, worker, pair)
