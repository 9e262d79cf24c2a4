"""The connections between a prefill worker and a decode worker: real sockets, pure schedulers."""

from __future__ import annotations

import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from msgspec import structs

from segue.config import EngineConfig
from segue.disagg import lease_machine, leases
from segue.disagg.lease import LeaseState
from segue.errors import ConfigError
from segue.kernels.cpu import ops as cpu
from segue.messages.kv import (
    BanWriters,
    ConnectPeer,
    DisconnectPeer,
    Gone,
    Hello,
    KVCommand,
    PromptLogprobs,
    RankAddress,
    TransportOffer,
)
from segue.messages.kv_link import LinkClosed, LinkEvent, LinkOpened
from segue.messages.requests import Handoff, SamplingParams
from segue.worker import kv_links
from segue.worker.kv_links import REFUSED_S, KVLinks
from tests.disagg.cluster import Worker
from tests.scheduler.simulation import next_token
from tests.support.kv_hello import hello

DEADLINE_S = 60.0
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
        blob: bytes = b"",
    ) -> None:
        super().__init__(role, role, f"incarnation of {role}", role=role)  # type: ignore[arg-type]
        self.events: deque[LinkEvent] = deque()
        self.commands: list[KVCommand] = []
        config = EngineConfig(role=role, host=host, disaggregation_bootstrap_port=port)
        offers = [TransportOffer(kind, blob) for kind in transports]
        self.said = hello(role, ranks=[RankAddress(f"/run/{role}", "", offers)])
        self.links = KVLinks(config, lambda: self.said, self.machine, self.events.append)

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

    def advance(self) -> bool:
        """Apply what is due."""
        self.machine.advance(time.monotonic())
        self.flush()
        return True

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


def granted(worker: LinkedWorker) -> bool:
    """Whether handoff 1 has pages that its prefill worker writes."""
    lease = worker.machine.leases.active.get(1)
    return lease is not None and lease.state is LeaseState.GRANTED


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
    (command,) = prefill.commands
    assert isinstance(command, ConnectPeer) and decode.commands == []
    assert 0 <= time.monotonic() - command.opened_at < DEADLINE_S
    assert (command.session, command.transport, command.tp) == (to_decode.session, "shm", 1)
    assert (command.kv_heads, command.ranks) == (8, hello("decode").ranks)


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


def blobs(hello: Hello) -> list[bytes]:
    return [offer.blob for rank in hello.ranks for offer in rank.offers]


def test_only_a_worker_that_has_proven_itself_learns_how_to_write(make: Callable[..., LinkedWorker]) -> None:
    prefill, decode = make("prefill"), make("decode", blob=b"where to write")
    said: list[Hello] = []
    on_event = prefill.links.on_event

    def note(event: LinkEvent, now: float) -> None:
        if isinstance(event, LinkOpened):
            said.append(event.hello)
        on_event(event, now)

    prefill.links.on_event = note  # type: ignore[method-assign]
    connect(prefill, decode)
    assert [blobs(hello) for hello in said] == [[b""]], "the handshake does not say it"
    (command,) = prefill.commands
    assert isinstance(command, ConnectPeer)
    assert [offer.blob for rank in command.ranks for offer in rank.offers] == [b"where to write"]


@pytest.mark.parametrize(("path", "kinds"), [("/run/decode", ["shm", "nixl"]), ("/run/other", ["shm"])])
def test_pools_that_contradict_the_handshake_end_the_connection(
    prefill: LinkedWorker, decode: LinkedWorker, caplog: pytest.LogCaptureFixture, path: str, kinds: list[str]
) -> None:
    ranks = [RankAddress(path, "", [TransportOffer(kind, b"x") for kind in kinds])]
    decode.links._hello = lambda: hello("decode", ranks=ranks)
    decode.machine.peers.connect(prefill.address)
    decode.flush()
    until(lambda: "Pools has other ranks or transports than Hello" in caplog.text, prefill, decode)
    assert prefill.commands == [] and prefill.machine.peers.open == {}


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


def test_an_address_that_cannot_be_reached_is_logged_once_per_change(
    make: Callable[..., LinkedWorker], decode: LinkedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings() -> list[str]:
        texts = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
        return [text for text in texts if "no connection to the prefill engine" in text]

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody listens
        port = unused.getsockname()[1]
        for number in (1, 2, 3):
            decode.request(number, peer=f"127.0.0.1:{port}")
            until(lambda number=number: recomputed(decode) == {"link": number}, decode)
        assert len(warnings()) == 1 and f"at 127.0.0.1:{port}: " in warnings()[0]
    prefill = make("prefill", port=port)
    connect(prefill, decode)
    prefill.links.close()
    until(lambda: not decode.machine.peers.open, decode)
    decode.request(4, peer=f"127.0.0.1:{port}")
    until(lambda: recomputed(decode) == {"link": 4}, decode)
    assert len(warnings()) == 2, "it was reached meanwhile"


def test_what_is_known_of_addresses_is_bounded(decode: LinkedWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_links, "MAX_REFUSALS", 2)
    for port in (1, 2, 3):
        decode.links._note_refusal(f"127.0.0.1:{port}", LinkClosed(port, "kv_link_lost", "refused"), 0.0)
    assert list(decode.links._refusals) == ["127.0.0.1:2", "127.0.0.1:3"]


def test_a_prefill_worker_opens_and_closes_its_port_with_its_role(prefill: LinkedWorker) -> None:
    address = prefill.address
    assert prefill.links.set_role("decode") is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=60)
    assert prefill.links.set_role("prefill") == prefill.address
    socket.create_connection(("127.0.0.1", int(prefill.address.rpartition(":")[2])), timeout=60).close()


def test_a_connection_that_was_opened_while_the_role_changed_is_closed(
    prefill: LinkedWorker, decode: LinkedWorker
) -> None:
    decode.machine.peers.connect(prefill.address)
    decode.flush()
    until(lambda: any(isinstance(event, LinkOpened) for event in prefill.events), decode)
    prefill.said = hello("decode", incarnation="incarnation of prefill")  # its role now
    until(lambda: not decode.machine.peers.open and not prefill.events, prefill, decode)
    assert not prefill.machine.peers.open


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_prefill_worker_in_a_long_step_keeps_its_leases(
    prefill: LinkedWorker, decode: LinkedWorker, monkeypatch: pytest.MonkeyPatch, is_busy: bool
) -> None:
    monkeypatch.setattr(leases, "SILENT_S", 2.5)
    monkeypatch.setattr(lease_machine, "SILENT_S", 2.5)
    prefill.request(1)
    decode.request(1, peer=prefill.address)
    prefill.launch()
    until(lambda: decode.launch() is None and granted(decode), prefill, decode)
    if is_busy:
        prefill.links.set_load(prefill.scheduler)  # and now its loop waits for the step
    end = time.monotonic() + 5.0
    until(lambda: decode.advance() and time.monotonic() > end, decode)
    assert granted(decode) is is_busy
    assert recomputed(decode) == ({} if is_busy else {"expired": 1})


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


def test_a_prefill_worker_that_does_not_fit_is_told_of_for_a_while(
    prefill: LinkedWorker, decode: LinkedWorker
) -> None:
    fit, decode.said = decode.said, structs.replace(decode.said, page_size=prefill.said.page_size * 2)
    decode.machine.peers.connect(prefill.address)
    decode.flush()
    until(lambda: decode.links.refused(time.monotonic()), prefill, decode)
    now = time.monotonic()
    (reason,) = decode.links.refused(now).values()
    assert decode.links.refused(now).keys() == {prefill.address} and "page_size is" in reason
    assert decode.links.refused(now + REFUSED_S) == {}
    decode.said = fit
    connect(prefill, decode)
    assert decode.links.refused(now) == {}


def test_a_prefill_worker_that_is_not_there_may_be_there_at_the_next_attempt(decode: LinkedWorker) -> None:
    decode.links._note_refusal("127.0.0.1:1", LinkClosed(1, "kv_link", "nobody listens"), 0.0)
    assert decode.links.refused(0.0) == {}


def test_a_connection_that_opens_behind_a_change_of_the_role_is_closed(
    prefill: LinkedWorker, decode: LinkedWorker
) -> None:
    decode.machine.peers.connect(prefill.address)
    decode.flush()
    until(lambda: decode.events, prefill)
    decode.said = hello("prefill")  # it prefills from now on, so neither side says how to write to its pool
    until(lambda: not decode.links._dialed, prefill, decode)
    assert not decode.machine.peers.open
    decode.said = hello("decode", ranks=[RankAddress("/run/decode", "", [TransportOffer("shm", b"")])])
    connect(prefill, decode)


def test_workers_with_and_without_the_cpus_kernels_have_other_numerics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = SimpleNamespace(
        device=torch.device("cpu"), dtype=torch.bfloat16, attention_backend="cpu-invariant"
    )
    found = []
    for is_usable in (True, False):
        monkeypatch.setattr(cpu, "usable", lambda _, is_usable=is_usable: is_usable)
        found.append(kv_links._device_numerics(runner))
    assert found[0] != found[1]
