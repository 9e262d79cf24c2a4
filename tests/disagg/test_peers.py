"""Open connections by the worker at the other end, and what waits to be sent over them."""

from __future__ import annotations

import pytest

from segue.disagg.peers import Peers, PeerWorker
from segue.messages.kv import Gone
from tests.support.kv_hello import hello

GONE = Gone(handoff=1, lease=1, reason="aborted")
INCARNATION = "incarnation of prefill"


def opened(
    peers: Peers, number: int = 1, address: str | None = "p:1", incarnation: str = INCARNATION
) -> None:
    peer = hello("prefill", incarnation=incarnation)
    addresses = set() if address is None else {address}
    peers.opened(
        PeerWorker(number=number, session=f"s{number}", hello=peer, transport="shm", addresses=addresses)
    )


@pytest.fixture
def peers() -> Peers:
    return Peers()


def test_a_connection_is_found_by_its_number_and_by_its_address(peers: Peers) -> None:
    opened(peers)
    assert peers.of(1) is peers.at("p:1") is peers.open[INCARNATION]
    assert peers.of(2) is None and peers.at("p:2") is None


def test_a_worker_may_be_reached_at_two_addresses(peers: Peers) -> None:
    worker = hello("prefill")
    peers.opened(
        PeerWorker(number=1, session="s1", hello=worker, transport="shm", addresses={"p:1", "localhost:1"})
    )
    assert peers.at("p:1") is peers.at("localhost:1") is peers.of(1)


def test_an_address_is_connected_to_once(peers: Peers) -> None:
    peers.connect("p:1")
    peers.connect("p:1")
    assert peers.connects == ["p:1"]
    peers.connects.clear()
    opened(peers)
    peers.connect("p:1")
    assert peers.connects == []


@pytest.mark.parametrize("end", ["unreachable", "closed"])
def test_an_address_that_is_lost_is_connected_to_again(peers: Peers, end: str) -> None:
    peers.connect("p:1")
    peers.connects.clear()
    if end == "unreachable":
        peers.unreachable("p:1")
    else:
        opened(peers)
        peers.closed(1)
    peers.connect("p:1")
    assert peers.connects == ["p:1"]


def test_a_connection_from_elsewhere_does_not_end_an_attempt(peers: Peers) -> None:
    peers.connect("p:1")
    opened(peers, address=None)
    peers.connect("p:1")
    assert peers.connects == ["p:1"]


def test_messages_are_in_order_and_name_the_connection(peers: Peers) -> None:
    opened(peers, 1)
    opened(peers, 2, "p:2", "another")
    for incarnation in (INCARNATION, "another", INCARNATION):
        peers.send(incarnation, GONE)
    assert peers.messages == [(1, GONE), (2, GONE), (1, GONE)]


def test_without_a_connection_messages_are_dropped(peers: Peers) -> None:
    opened(peers)
    peer = peers.closed(1)
    assert peer is not None and peer.session == "s1"
    peers.send(INCARNATION, GONE)
    peers.close(INCARNATION, "no reason")
    assert peers.messages == [] and peers.closes == []


def test_a_connection_is_open_until_its_end_is_reported(peers: Peers) -> None:
    opened(peers)
    peers.close(INCARNATION, "it is stuck")
    assert peers.closes == [(1, "it is stuck")] and peers.of(1) is not None


def test_the_end_of_an_unknown_connection_changes_nothing(peers: Peers) -> None:
    opened(peers)
    assert peers.closed(7) is None and peers.of(1) is not None
