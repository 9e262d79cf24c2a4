"""Workers that must not be connected, and strangers that try to connect."""

from __future__ import annotations

import logging
import socket
from typing import Any

import msgspec
import pytest

from segue.disagg import frames
from segue.disagg.handshake import LinkSide, sign
from segue.disagg.link_loop import MAX_HALF_OPEN
from segue.messages.kv import Bye, Claim, Hello, Proof
from segue.messages.kv_link import LinkOpened
from tests.conftest import WaitUntil
from tests.support.kv_hello import DIFFERENCES, hello
from tests.support.kv_links import KEY, BarePeer, Worker, connect

LOOPBACK = "127.0.0.1:0"
WARNING = "a connection to 127.0.0.1:"


def interface() -> str:
    """An IPv4 address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.77", 9))  # sends nothing, but finds the address of the interface
        except OSError:
            pytest.skip("there is no interface but loopback")
        host: str = probe.getsockname()[0]
        return host


def refused(caplog: pytest.LogCaptureFixture, wait_until: WaitUntil) -> str:
    """What the accepting side logs; the test's connection is the only one."""
    wait_until(lambda: any(WARNING in record.getMessage() for record in caplog.records), what="the warning")
    return next(record.getMessage() for record in caplog.records if WARNING in record.getMessage())


def bye(peer: BarePeer) -> str:
    """The reason in the last message of a connection that the worker closes."""
    last = peer.messages()[-1]
    assert isinstance(last, Bye)
    return last.reason


# --- what must match ---


@pytest.mark.parametrize(("field", "value", "remedy"), DIFFERENCES, ids=[name for name, *_ in DIFFERENCES])
def test_a_difference_is_reported_on_both_sides(
    field: str, value: Any, remedy: str, caplog: pytest.LogCaptureFixture, wait_until: WaitUntil
) -> None:
    with Worker("prefill", LOOPBACK) as first, Worker("decode", **{field: value}) as second:
        closed = second.closed(second.links.connect(first.address))
        warning = refused(caplog, wait_until)
    one, other = getattr(first.hello, field), getattr(second.hello, field)
    assert closed.code == "kv_mismatch"
    there = "there" if field == "incarnation" else f"{one!r} there"
    assert f"{field} is {other!r} here and {there}" in closed.reason and remedy in closed.reason
    there = "there" if field == "incarnation" else f"{other!r} there"
    assert f"{field} is {one!r} here and {there}" in warning and remedy in warning
    assert first.events == []


def test_numerics_are_reported_on_both_sides_in_deterministic_mode(
    caplog: pytest.LogCaptureFixture, wait_until: WaitUntil
) -> None:
    with (
        Worker("prefill", LOOPBACK, deterministic=True) as first,
        Worker("decode", deterministic=True, numerics="A100") as second,
    ):
        closed = second.closed(second.links.connect(first.address))
        assert "numerics is 'A100' here and 'H200' there" in closed.reason
        assert "numerics is 'H200' here and 'A100' there" in refused(caplog, wait_until)


def test_a_worker_that_reaches_itself_is_told_so() -> None:
    with Worker("prefill", LOOPBACK, work=["prefill", "decode"]) as worker:
        closed = worker.closed(worker.links.connect(worker.address))
        assert (closed.code, "connect to another worker" in closed.reason) == ("kv_mismatch", True)


# --- keys ---


@pytest.mark.parametrize(
    ("here", "there", "text"),
    [
        (b"one", b"two", "does not fit the key here"),
        (b"one", None, "there is a key here and none there"),
        (None, b"two", "there is a key there and none here"),
    ],
    ids=["wrong", "none there", "none here"],
)
def test_another_key_is_reported_on_both_sides(
    here: bytes | None,
    there: bytes | None,
    text: str,
    caplog: pytest.LogCaptureFixture,
    wait_until: WaitUntil,
) -> None:
    with Worker("prefill", LOOPBACK, key=here) as first, Worker("decode", key=there) as second:
        closed = second.closed(second.links.connect(first.address))
        assert closed.code == "kv_refused"
        assert text in closed.reason and "--pd-key" in closed.reason
        assert text in refused(caplog, wait_until)


def test_without_a_key_an_address_that_others_reach_is_refused() -> None:
    with Worker("prefill", f"{interface()}:0", key=None) as first, Worker("decode", key=None) as second:
        closed = second.closed(second.links.connect(first.address))
        assert closed.code in ("kv_key", "kv_refused")
        assert "between two hosts needs a key, and this one has none; start both with the same --pd-key" in (
            closed.reason
        )
        assert first.events == []


def test_with_a_key_an_address_that_others_reach_is_connected() -> None:
    with Worker("prefill", f"{interface()}:0") as first, Worker("decode") as second:
        connect(second, first)


def test_a_proof_that_is_sent_back_opens_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, Worker("decode") as victim:
        peer = victim.links.connect(f"127.0.0.1:{server.getsockname()[1]}")
        sock, _ = server.accept()
        with sock:
            sock.sendall(frames.frame(msgspec.msgpack.encode(hello("prefill"))))
            reader, bodies = frames.FrameReader(), list[bytes]()
            while len(bodies) < 2:
                bodies += reader.feed(sock.recv(65536))
            sock.sendall(frames.frame(bodies[1]))
            closed = victim.closed(peer)
        assert (closed.code, "does not fit the key here" in closed.reason) == ("kv_key", True)
        assert not [event for event in victim.events if isinstance(event, LinkOpened)]


def test_a_proof_of_an_earlier_connection_opens_nothing() -> None:
    first = msgspec.msgpack.encode(hello("decode"))
    with Worker("prefill", LOOPBACK) as victim:
        with BarePeer(victim.address) as honest:
            second = honest.body()
            proof = frames.frame(first) + frames.frame(
                msgspec.msgpack.encode(Proof(sign(KEY, LinkSide.CONNECTING, first, second)))
            )
            honest.sock.sendall(proof)
            victim.wait(LinkOpened)
        with BarePeer(victim.address) as thief:
            thief.sock.sendall(proof)
            assert msgspec.msgpack.decode(thief.body(), type=Hello).nonce != hello("prefill").nonce
            assert "does not fit the key here" in bye(thief)
        assert len([event for event in victim.events if isinstance(event, LinkOpened)]) == 1


# --- the order ---


def test_a_message_before_the_handshake_is_refused() -> None:
    with Worker("prefill", LOOPBACK) as victim, BarePeer(victim.address) as peer:
        peer.body()
        peer.send(Claim(handoff=1, rid="r", num_tokens=1, prompt_hash=b""))
        assert "no message of a handshake (Invalid value 'Claim'" in bye(peer)
        assert victim.events == []


def test_a_message_between_hello_and_proof_is_refused() -> None:
    with Worker("prefill", LOOPBACK) as victim, BarePeer(victim.address) as peer:
        peer.body()
        peer.send(hello("decode"), Claim(handoff=1, rid="r", num_tokens=1, prompt_hash=b""))
        assert "no message of a handshake (Invalid value 'Claim'" in bye(peer)
        assert victim.events == []


# --- half-open connections ---


@pytest.mark.parametrize("messages", [[], [hello("decode")]], ids=["nothing", "Hello"])
def test_a_handshake_that_is_not_completed_ends_in_time(messages: list[Hello], wait_until: WaitUntil) -> None:
    with Worker("prefill", LOOPBACK, handshake_s=0.3) as victim, BarePeer(victim.address) as peer:
        peer.body()
        peer.send(*messages)
        with pytest.raises(EOFError):
            peer.body()
        connect_after = Worker("decode")
        with connect_after:
            connect(connect_after, victim)


def test_many_half_open_connections_do_not_keep_a_worker_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "segue")
    with Worker("prefill", LOOPBACK, handshake_s=60) as victim:
        peers = [BarePeer(victim.address) for _ in range(MAX_HALF_OPEN + 1)]
        for peer in peers:
            peer.body()
        with pytest.raises((EOFError, ConnectionError)):
            peers[0].body()  # it had to make room for the last one
        with Worker("decode") as worker:
            connect(worker, victim)
        peers[-1].sock.settimeout(0.05)
        with pytest.raises(TimeoutError):
            peers[-1].body()
        for peer in peers:
            peer.sock.close()
    assert f"{MAX_HALF_OPEN} newer connections wait for the handshake, which is the limit" in caplog.text


def test_a_visitor_that_only_connects_and_leaves_is_nothing_to_warn_of(
    caplog: pytest.LogCaptureFixture, wait_until: WaitUntil
) -> None:
    caplog.set_level(logging.DEBUG, "segue")
    with Worker("prefill", LOOPBACK) as victim:
        BarePeer(victim.address).sock.close()
        wait_until(lambda: "was not opened" in caplog.text)
        assert [record.levelname for record in caplog.records] == ["DEBUG"]
        assert victim.events == []
