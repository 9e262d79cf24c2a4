"""The connections between a prefill worker and a decode worker: real sockets, pure schedulers."""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Literal

import pytest

from segue.config import EngineConfig
from segue.disagg.lease import LeaseState
from segue.errors import ConfigError
from segue.messages.kv import (
    BanWriters,
    ConnectPeer,
    DisconnectPeer,
    Gone,
    KVCommand,
    PromptLogprobs,
    RankAddress,
    TransportOffer,
)
from segue.messages.kv_link import LinkEvent
from segue.messages.requests import Handoff, SamplingParams
from segue.worker.kv_links import KVLinks
from tests.disagg.cluster import Worker
from tests.scheduler.simulation import next_token
from tests.support.kv_hello import hello

DEADLINE_S = 10.0
PROMPT = [5, 6, 7, 8, 9]
PARAMS = SamplingParams(max_new_tokens=4)


class LinkedWorker(Worker):
    """A scheduler whose messages real connections carry, and that runs in the test's thread."""

    def __init__(
        self,
        role: Literal["prefill", "decode"],
        host: str = "127.0.0.1",
        port: int = 0,
        transports: Sequence[str] = ("shm",),
    ) -> None:
        super().__init__(role, role, f"incarnation of {role}", role=role)  # type: ignore[arg-type]
        self.events: deque[LinkEvent] = deque()
        self.commands: list[KVCommand] = []
        config = EngineConfig(role=role, host=host, disaggregation_bootstrap_port=port)
        offers = [TransportOffer(kind, b"") for kind in transports]
        said = hello(role, ranks=[RankAddress(f"/run/{role}", "", offers)])
        self.links = KVLinks(config, lambda: said, self.machine, self.events.append)

    @property
    def address(self) -> str:
        assert self.links.address is not None
        return self.links.address

    def turn(self) -> None:
        """Take the events that have come, and carry out what they lead to."""
        self.now = self.scheduler.now = time.monotonic()
        while self.events:
            self.links.on_event(self.events.popleft(), self.now)
            self.flush()

    def flush(self) -> None:
        self.links.flush(self.now)
        self.take_replies()
        peers = self.machine.peers
        commands, peers.commands = peers.commands, []
        self.commands += commands

    def request(self, handoff: int, *, peer: str = "") -> str:
        """Send a request, of which this worker does its part; returns its id."""
        part: Literal["prefill", "decode"] = "decode" if peer else "prefill"
        rid = f"r{handoff}"
        assert self.start(rid, PROMPT, PARAMS, Handoff(id=handoff, part=part, peer=peer, whole=True))
        self.flush()
        return rid


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def make(stack: ExitStack) -> Callable[..., LinkedWorker]:
    def start(role: Literal["prefill", "decode"], **where: object) -> LinkedWorker:
        worker = LinkedWorker(role, **where)  # type: ignore[arg-type]
        stack.callback(worker.links.close)
        return worker

    return start


@pytest.fixture
def prefill(make: Callable[..., LinkedWorker]) -> LinkedWorker:
    return make("prefill")


@pytest.fixture
def decode(make: Callable[..., LinkedWorker]) -> LinkedWorker:
    return make("decode")


def until(condition: Callable[[], object], *workers: LinkedWorker) -> None:
    """Let workers run until a condition holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        for worker in workers:
            worker.turn()
        time.sleep(0.001)


def connect(prefill: LinkedWorker, decode: LinkedWorker) -> None:
    """Open a connection."""
    decode.machine.peers.connect(prefill.address)
    decode.flush()
    until(lambda: prefill.machine.peers.open and decode.machine.peers.open, prefill, decode)


def recomputed(worker: LinkedWorker) -> dict[str, int]:
    return worker.scheduler.handover.counters().recomputed


def test_only_a_prefill_worker_listens(prefill: LinkedWorker, decode: LinkedWorker) -> None:
    assert prefill.links.address is not None and decode.links.address is None


def test_a_connection_is_open_on_both_sides_under_one_name(
    prefill: LinkedWorker, decode: LinkedWorker
) -> None:
    connect(prefill, decode)
    (to_decode,) = prefill.machine.peers.open.values()
    (to_prefill,) = decode.machine.peers.open.values()
    assert to_decode.session == to_prefill.session
    assert (to_decode.addresses, to_prefill.addresses) == (set(), {prefill.address})
    command = ConnectPeer(
        session=to_decode.session, transport="shm", tp=1, kv_heads=8, ranks=hello("decode").ranks
    )
    assert prefill.commands == [command] and decode.commands == []


def test_both_sides_name_the_transport_that_the_decode_worker_likes_best(
    make: Callable[..., LinkedWorker], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="segue")
    prefill, decode = make("prefill", transports=("shm", "nixl")), make("decode", transports=("nixl", "shm"))
    connect(prefill, decode)
    (command,) = prefill.commands
    assert isinstance(command, ConnectPeer) and command.transport == "nixl"
    for name in ("prefill-1", "decode-1"):
        assert f"connected to {name}, to hand over KV by nixl" in caplog.text


def test_a_claim_is_answered_over_the_connection_that_it_opens(
    prefill: LinkedWorker, decode: LinkedWorker
) -> None:
    prefill.request(1)
    rid = decode.request(1, peer=prefill.address)
    prefill.launch()
    prefill.apply()
    until(lambda: decode.outputs[rid], prefill, decode)
    assert decode.outputs[rid] == [next_token(PROMPT)]
    assert decode.machine.leases.active[1].state is LeaseState.QUEUED


def test_the_end_of_a_connection_is_told_to_both_machines(
    prefill: LinkedWorker, decode: LinkedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    connect(prefill, decode)
    (peer,) = decode.machine.peers.open.values()
    decode.machine.peers.close(peer.hello.incarnation, "it is stuck")
    decode.flush()
    until(lambda: not (prefill.machine.peers.open or decode.machine.peers.open), prefill, decode)
    assert decode.commands == [BanWriters(session=peer.session)]
    assert prefill.commands[1:] == [DisconnectPeer(session=peer.session)]
    assert (
        "the connection to prefill-1 is closed: this side closed the connection: it is stuck" in caplog.text
    )
    assert "the connection to decode-1 is closed: the other side closed" in caplog.text


def test_a_request_whose_prefill_worker_cannot_be_reached_computes_its_prompt(decode: LinkedWorker) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody listens
        decode.request(1, peer=f"127.0.0.1:{unused.getsockname()[1]}")
        until(lambda: recomputed(decode) == {"link": 1}, decode)
    assert [request.rid for request in decode.scheduler.waiting] == ["r1"]


def test_a_request_with_a_malformed_address_computes_its_prompt_at_once(
    decode: LinkedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    decode.request(1, peer="nowhere")
    assert recomputed(decode) == {"link": 1}
    assert "address 'nowhere' must be HOST:PORT" in caplog.text
    decode.request(2, peer="nowhere")
    assert recomputed(decode) == {"link": 2}, "the address is tried again"


def test_a_message_over_its_limit_costs_the_connection(
    prefill: LinkedWorker, decode: LinkedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    connect(prefill, decode)
    message = Gone(handoff=1, lease=1, reason="aborted", message="x" * (1 << 20))
    prefill.machine.peers.send("incarnation of decode", message)
    prefill.flush()
    until(lambda: not (prefill.machine.peers.open or decode.machine.peers.open), prefill, decode)
    assert "Gone has 1048" in caplog.text and "its limit is 1048576" in caplog.text


def test_a_peer_that_breaks_the_protocol_is_disconnected_and_told_why(
    prefill: LinkedWorker, decode: LinkedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="segue")
    decode.request(1, peer=prefill.address)
    until(lambda: prefill.machine.peers.open and decode.machine.peers.open, prefill, decode)
    prefill.machine.peers.send("incarnation of decode", PromptLogprobs(handoff=1, part=3, entries=[]))
    prefill.flush()
    until(lambda: not prefill.machine.peers.open, prefill, decode)
    assert "PromptLogprobs for handoff 1 has part 3, but part 0 comes next" in caplog.text
    assert recomputed(decode) == {"link": 1}


def test_the_late_end_of_a_connection_does_not_harm_the_next_one(
    prefill: LinkedWorker, decode: LinkedWorker
) -> None:
    connect(prefill, decode)
    (old,) = decode.machine.peers.open.values()
    decode.machine.peers.closes.append((old.number, "it broke the protocol"))
    decode.machine.on_closed(old.number, decode.now)  # before the event of the connection's end
    rid = decode.request(1, peer=prefill.address)
    until(lambda: decode.machine.peers.open and decode.machine.peers.of(old.number) is None, prefill, decode)
    assert recomputed(decode) == {} and rid in decode.scheduler.handover.awaiting
    (new,) = decode.machine.peers.open.values()
    assert decode.machine.leases.active[1].session == new.session != old.session


def test_a_port_in_use_is_refused_by_name(prefill: LinkedWorker) -> None:
    port = int(prefill.address.rpartition(":")[2])
    with pytest.raises(ConfigError, match=r"in use.*--disaggregation-bootstrap-port"):
        LinkedWorker("prefill", port=port)


def test_an_ipv6_host_is_put_in_brackets(make: Callable[..., LinkedWorker]) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    assert make("prefill", host="::1").address.startswith("[::1]:")


def test_closing_ends_the_connections(prefill: LinkedWorker, decode: LinkedWorker) -> None:
    connect(prefill, decode)
    prefill.links.close()
    until(lambda: not decode.machine.peers.open, decode)
