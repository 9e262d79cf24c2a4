"""Two workers' connections over real sockets: how they open, what they carry, and how they end."""

from __future__ import annotations

import gc
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from segue.disagg import link_loop, links
from segue.disagg.addresses import SocketAddress, resolve
from segue.disagg.link import MAX_UNANSWERED
from segue.errors import ConfigError, KVProtocolError
from segue.messages.kv import Claim, Gone, Grant, KVMessage, Ping, Pong, Pushed
from segue.messages.kv_link import LinkClosed, LinkMessage, LinkOpened
from tests.conftest import WaitUntil
from tests.support.kv_links import Worker, connect

LOOPBACK = "127.0.0.1:0"


def claim(handoff: int, size: int = 32) -> Claim:
    return Claim(handoff=handoff, rid=f"r{handoff}", num_tokens=7, prompt_hash=bytes(size))


def listening(kind: str, folder: Path) -> str:
    return {"ipv4": LOOPBACK, "ipv6": "[::1]:0", "unix": f"unix:{folder}/kv.sock"}[kind]


# --- opening ---


@pytest.mark.parametrize("kind", ["ipv4", "ipv6", "unix"])
@pytest.mark.parametrize("key", [b"key", None])
def test_both_sides_learn_who_the_other_one_is(kind: str, key: bytes | None, tmp_path: Path) -> None:
    with Worker("prefill", listening(kind, tmp_path), key=key) as first, Worker("decode", key=key) as second:
        ours, theirs = connect(second, first)
        opened = second.wait(LinkOpened, lambda event: event.peer == ours)
        assert opened.hello.engine_id == "prefill-1"
        other = first.wait(LinkOpened, lambda event: event.peer == theirs)
        assert other.hello.engine_id == "decode-1"
        assert other.session == opened.session
        assert opened.hello.nonce not in (bytes(32), first.hello.nonce)


def test_a_worker_is_reached_by_its_host_name() -> None:
    with Worker("prefill", LOOPBACK) as first, Worker("decode") as second:
        peer = second.links.connect(first.address.replace("127.0.0.1", "localhost"))
        second.wait(LinkOpened, lambda event: event.peer == peer)


def test_the_next_address_of_a_host_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def two(address: str, *, numeric: bool = False) -> list[SocketAddress]:
        return [*refusing, *resolve(address, numeric=numeric)]

    with socket.socket() as unused, Worker("prefill", LOOPBACK) as first, Worker("decode") as second:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        refusing: list[SocketAddress] = [
            (socket.AF_UNIX, "/nobody/is/here"),
            (socket.AF_INET, unused.getsockname()),
        ]
        monkeypatch.setattr(links, "resolve", two)
        peer = second.links.connect(first.address)
        second.wait(LinkOpened, lambda event: event.peer == peer)


def test_every_connection_has_another_number_and_another_nonce() -> None:
    with Worker("prefill", LOOPBACK) as first, Worker("decode") as second:
        pairs = [connect(second, first) for _ in range(5)]
        assert len({ours for ours, _ in pairs}) == len({theirs for _, theirs in pairs}) == 5
        opened = [event for event in second.events if isinstance(event, LinkOpened)]
        assert len({event.hello.nonce for event in opened}) == len({event.session for event in opened}) == 5


def test_an_address_where_nobody_listens_is_reported() -> None:
    with socket.socket() as unused, Worker("decode") as worker:
        unused.bind(("127.0.0.1", 0))
        closed = worker.closed(worker.links.connect(f"127.0.0.1:{unused.getsockname()[1]}"))
        assert (closed.code, "Connection refused" in closed.reason) == ("kv_link_lost", True)


def test_a_host_that_is_not_known_is_reported() -> None:
    with Worker("decode") as worker:
        closed = worker.closed(worker.links.connect("no..name:80"))
        assert closed.code == "kv_link_lost"
        assert "host 'no..name' of no..name:80 is not known" in closed.reason


def test_a_malformed_address_is_an_error_at_once() -> None:
    with Worker("decode") as worker, pytest.raises(ConfigError, match="must be HOST:PORT"):
        worker.links.connect("nowhere")


def test_a_side_that_accepts_and_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, Worker("decode", handshake_s=0.2) as worker:
        closed = worker.closed(worker.links.connect(f"127.0.0.1:{silent.getsockname()[1]}"))
        assert closed.code == "kv_link_lost"
        assert "has not completed the handshake within 0.2 s" in closed.reason


def test_a_full_queue_of_a_unix_socket_is_reported(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as full, Worker("decode") as worker:
        full.bind(f"{tmp_path}/full.sock")
        full.listen(0)
        with socket.socket(socket.AF_UNIX) as waiting:
            waiting.connect(f"{tmp_path}/full.sock")
            closed = worker.closed(worker.links.connect(f"unix:{tmp_path}/full.sock"))
        assert (closed.code, "Resource temporarily unavailable" in closed.reason) == ("kv_link_lost", True)


def test_a_connection_over_the_limit_is_refused_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_loop, "MAX_LINKS", 2)
    with Worker("prefill", LOOPBACK) as first, Worker("decode") as second:
        pairs = [connect(second, first) for _ in range(2)]
        closed = second.closed(second.links.connect(first.address))
        assert closed.code == "kv_refused"
        assert "there are 2 connections to other workers, which is the limit" in closed.reason
        second.links.disconnect(pairs[0][0], "room for another")
        first.closed(pairs[0][1])
        connect(second, first)


# --- messages ---


def test_messages_keep_their_order_under_load_in_both_directions(wait_until: WaitUntil) -> None:
    sent: list[KVMessage] = [claim(number, size=number % 900) for number in range(10_000)]
    with Worker("prefill", LOOPBACK) as first, Worker("decode") as second:
        ours, theirs = connect(second, first)

        def send(worker: Worker, peer: int) -> None:
            for message in sent:
                worker.links.send(peer, message)

        senders = [threading.Thread(target=send, args=pair) for pair in ((first, theirs), (second, ours))]
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
        wait_until(lambda: len(first.messages(theirs)) == len(second.messages(ours)) == 10_000, timeout=30)
        assert first.messages(theirs) == sent
        assert second.messages(ours) == sent


def test_every_message_is_written_at_once() -> None:
    with Worker("prefill", LOOPBACK, silence_s=60) as first, Worker("decode", silence_s=60) as second:
        ours, theirs = connect(second, first)
        for message in map(claim, range(20)):
            second.links.send(ours, message)
            first.wait(LinkMessage, partial(LinkMessage.__eq__, LinkMessage(theirs, message)))


def test_a_grant_of_the_largest_size_passes() -> None:
    grant = Grant(handoff=1, lease=1, first_page=0, pages=bytes((4 << 20) - 40))
    with Worker("prefill", LOOPBACK) as first, Worker("decode") as second:
        ours, theirs = connect(second, first)
        second.links.send(ours, grant)
        assert first.wait(LinkMessage, lambda event: event.peer == theirs).message == grant


def test_a_message_over_its_limit_is_the_senders_error_and_the_connection_goes_on() -> None:
    with Worker("prefill", LOOPBACK) as first, Worker("decode") as second:
        ours, _ = connect(second, first)
        with pytest.raises(KVProtocolError, match=r"Claim has .* bytes; its limit is 1048576"):
            second.links.send(ours, claim(1, size=1 << 20))
        second.links.send(ours, claim(2))
        assert first.wait(LinkMessage).message == claim(2)


def test_what_is_sent_from_the_event_of_the_opening_arrives() -> None:
    with Worker("prefill", LOOPBACK) as first, Worker("decode") as second:
        seen = first.events.append

        def answer(event: Any) -> None:
            seen(event)
            if isinstance(event, LinkOpened):
                first.links.send(event.peer, claim(event.peer))

        first.on_event = answer
        peer = second.links.connect(first.address)
        message = second.wait(LinkMessage, lambda event: event.peer == peer).message
        assert isinstance(message, Claim)
        assert isinstance(second.events[0], LinkOpened)


def test_messages_for_a_connection_that_has_ended_are_dropped() -> None:
    with Worker("prefill", LOOPBACK) as first, Worker("decode") as second:
        ours, theirs = connect(second, first)
        first.links.disconnect(theirs, "enough")
        second.closed(ours)
        second.links.send(ours, claim(1))
        second.links.send(10_000, claim(1))
        second.links.disconnect(ours, "again")
        ours, theirs = connect(second, first)
        second.links.send(ours, claim(2))
        assert first.wait(LinkMessage).message == claim(2)


# --- pings ---


def test_an_idle_connection_stays_open(wait_until: WaitUntil) -> None:
    with (
        Worker("prefill", LOOPBACK, silence_s=0.2) as first,
        Worker("decode", silence_s=10.0) as second,
    ):
        ours, theirs = connect(second, first)
        first.links.set_load(step=7, busy=True)
        second.links.set_load(step=3, busy=False)
        ping = second.wait(
            LinkMessage, lambda event: isinstance(event.message, Ping) and event.message.step > 0
        )
        assert ping == LinkMessage(ours, Ping(step=7, busy=True))
        pong = Pong(step=3, busy=False)
        first.wait(LinkMessage, lambda event: event == LinkMessage(theirs, pong))

        def num_pings() -> int:
            messages = [event.message for event in list(second.events) if isinstance(event, LinkMessage)]
            return sum(isinstance(message, Ping) for message in messages)

        wait_until(lambda: num_pings() > MAX_UNANSWERED + 1)
        assert not [event for event in first.events if isinstance(event, LinkClosed)]


def test_nothing_runs_while_nothing_happens() -> None:
    with Worker("prefill", LOOPBACK) as first, Worker("decode") as second:
        began = time.monotonic()
        connect(second, first)
        clocks = [time.pthread_getcpuclockid(worker.links._thread.ident or 0) for worker in (first, second)]
        busy = sum(map(time.clock_gettime, clocks))
        # Whichever side pings first keeps the other one from pinging, so this one may see answers only.
        first.wait(LinkMessage, lambda event: isinstance(event.message, Ping | Pong))
        assert time.monotonic() - began > 0.5
        assert sum(map(time.clock_gettime, clocks)) - busy < 0.1 * (time.monotonic() - began)


# --- the end ---


@pytest.mark.parametrize("kind", ["ipv4", "unix"])
@pytest.mark.parametrize("closer", ["accepting", "connecting"])
def test_all_that_was_sent_before_the_end_arrives_and_then_the_reason(
    kind: str, closer: str, tmp_path: Path
) -> None:
    with Worker("prefill", listening(kind, tmp_path)) as first, Worker("decode") as second:
        ours, theirs = connect(second, first)
        sides = [(first, theirs), (second, ours)]
        (sender, peer), (receiver, other) = sides if closer == "accepting" else sides[::-1]
        sent = [claim(number, size=1000) for number in range(2000)]
        for message in sent:
            sender.links.send(peer, message)
            receiver.links.send(other, Pushed(handoff=1, lease=1, pages=message.handoff))
        sender.links.disconnect(peer, "the role has changed")
        assert sender.closed(peer) == LinkClosed(
            peer, "kv_link", "this side closed the connection: the role has changed"
        )
        closed = receiver.closed(other)
        assert closed.code == "kv_link"
        assert closed.reason == "the other side closed the connection: the role has changed"
        assert receiver.messages(other)[:-1] == sent  # and a Bye


def test_what_was_sent_arrives_even_if_the_worker_shuts_down_right_after_closing() -> None:
    with Worker("decode") as second:
        with Worker("prefill", LOOPBACK) as first:
            ours, theirs = connect(second, first)
            for number in range(20):
                first.links.send(theirs, Grant(handoff=number, lease=1, first_page=0, pages=bytes(700_000)))
            first.links.disconnect(theirs, "the role has changed")
        assert second.closed(ours).reason.endswith("the role has changed")
        assert len(second.messages(ours)) == 21  # and a Bye


def test_no_event_follows_the_end() -> None:
    with Worker("prefill", LOOPBACK) as first, Worker("decode") as second:
        ours, theirs = connect(second, first)
        stop = threading.Event()

        def send() -> None:
            while not stop.is_set():
                second.links.send(ours, claim(1))

        sender = threading.Thread(target=send)
        sender.start()
        first.wait(LinkMessage)
        first.links.disconnect(theirs, "enough")
        second.closed(ours)
        stop.set()
        sender.join()
        assert isinstance(first.events[-1], LinkClosed)
        assert isinstance(second.events[-1], LinkClosed)
        assert sum(isinstance(event, LinkClosed) for event in first.events + second.events) == 2


def test_a_worker_that_shuts_down_says_so_and_leaves_no_socket(tmp_path: Path) -> None:
    with Worker("decode") as second:
        with Worker("prefill", f"unix:{tmp_path}/kv.sock") as first:
            ours, theirs = connect(second, first)
            first.links.send(theirs, Gone(handoff=1, lease=1, reason="aborted"))
        closed = second.closed(ours)
        assert (closed.code, "the worker shuts down" in closed.reason) == ("kv_link", True)
        assert second.messages(ours)[0] == Gone(handoff=1, lease=1, reason="aborted")
        assert first.closed(theirs).code == "kv_link"
        assert list(tmp_path.iterdir()) == []


def test_both_sides_may_close_at_once() -> None:
    with Worker("prefill", LOOPBACK) as first, Worker("decode") as second:
        ours, theirs = connect(second, first)
        first.links.disconnect(theirs, "one")
        second.links.disconnect(ours, "two")
        assert (first.closed(theirs).code, second.closed(ours).code) == ("kv_link", "kv_link")


def test_a_connection_that_is_being_opened_can_be_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, Worker("decode") as worker:
        peer = worker.links.connect(f"127.0.0.1:{silent.getsockname()[1]}")
        worker.links.disconnect(peer, "not needed any more")
        assert worker.closed(peer).reason.endswith("not needed any more")


def test_a_connection_whose_host_is_being_looked_up_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    known = threading.Event()

    def slow(address: str, *, numeric: bool = False) -> list[SocketAddress]:
        return [] if numeric or not known.wait(60) else resolve(address)

    monkeypatch.setattr(links, "resolve", slow)
    with Worker("prefill", LOOPBACK) as first, Worker("decode") as second:
        peer = second.links.connect(first.address)
        second.links.disconnect(peer, "not needed any more")
        second.closed(peer)
        known.set()
        connect(second, first)
        assert [event.peer for event in second.events] == [peer, peer + 1]


def test_nothing_leaks_over_two_hundred_connections(wait_until: WaitUntil) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    gc.collect()  # what earlier tests have left would go meanwhile
    with Worker("prefill", LOOPBACK) as first:
        before = descriptors(), threading.active_count()
        for number in range(200):
            with Worker("decode") as second:
                ours, theirs = connect(second, first)
                second.links.send(ours, claim(number))
                if number % 2:
                    first.links.disconnect(theirs, "enough")
            first.closed(theirs)
        wait_until(lambda: (descriptors(), threading.active_count()) == before, what="everything is closed")
