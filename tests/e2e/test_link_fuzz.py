"""Whatever comes to a prefill engine's port, it serves on, names what is wrong, and keeps its memory."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from msgspec import structs

from segue.disagg import frames
from segue.disagg.offer import MAX_EARLY_CLAIMS
from segue.errors import short_repr
from segue.messages.kv import (
    Bye,
    Claim,
    Gone,
    Grant,
    Hello,
    KVIdentity,
    Ping,
    Pong,
    Pools,
    Proof,
    Revoke,
    Sent,
)
from tests.e2e.served import Served, greedy, serve
from tests.support.kv_hello import DIFFERENCES
from tests.support.kv_links import BarePeer

MIB = 1 << 20
BOUND_MIB = 128  # that the worker's memory may grow by; each of 16 strangers may hold a frame of 4 MiB
FIELDS = [field for field, *_ in DIFFERENCES]


class PrefillServer:
    """A prefill server, and what it says of itself at its port."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.address = served.get("/server_info").json()["decided"]["control_address"]
        with BarePeer(self.address) as peer:
            self.hello = msgspec.msgpack.decode(peer.body(), type=Hello)

    def fitting(self, **changes: Any) -> Hello:
        """Returns the Hello of a decode engine that fits to this server, unless it is changed."""
        fit = structs.replace(
            self.hello, work=["decode"], incarnation="other", engine_id="decode-1", nonce=os.urandom(32)
        )
        return structs.replace(fit, **changes)

    def open(self) -> BarePeer:
        """Open a connection as a decode engine without a key."""
        peer = BarePeer(self.address)
        peer.body()
        peer.send(self.fitting(incarnation=os.urandom(8).hex()), Proof(b""))
        assert isinstance(msgspec.msgpack.decode(peer.body(), type=Proof), Proof)
        peer.send(Pools(ranks=self.hello.ranks))
        return peer

    def reason(self, *messages: Any) -> str:
        """Returns why the server closes a connection on which these messages come."""
        with BarePeer(self.address) as peer:
            peer.body()
            peer.send(*messages)
            (bye,) = peer.messages()
        assert isinstance(bye, Bye)
        return bye.reason

    def check_serves(self) -> None:
        """Assert that the engine answers a request, and that a decode engine can connect."""
        body = {"input_ids": [5, 6, 7], "sampling_params": greedy(1)}
        reply = self.served.post("/generate", body)
        assert reply.status_code == 200 and len(reply.json()["output_ids"]) == 1
        with self.open() as peer:
            peer.send(Ping(step=0, busy=False))
            assert frames.decode(peer.body())

    @property
    def resident_mib(self) -> float:
        (worker,) = self.served.workers()
        status = Path(f"/proc/{worker}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) / 1024


OPTIONS = [
    "--role=prefill",
    "--load-format=dummy",
    "--dtype=float32",
    "--device=cpu",
    "--page-size=4",
    "--num-kv-tokens=512",
    "--disaggregation-bootstrap-port=0",
]


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefillServer]:
    with ExitStack() as stack:
        log = stack.enter_context((tmp_path_factory.mktemp("fuzz") / "log").open("w+"))
        yield PrefillServer(stack.enter_context(serve(f"--model={tiny_model}", *OPTIONS, log=log)))
        log.seek(0)
        text = log.read()
        assert "Traceback" not in text
        assert text.count("was not opened") < 30, "strangers cannot fill the log"


@pytest.mark.parametrize("field", [field for field in FIELDS if field != "incarnation"])
def test_a_hello_with_another_value_is_refused_with_both_values(server: PrefillServer, field: str) -> None:
    (other,) = (value for name, value, _ in DIFFERENCES if name == field)
    here = getattr(server.hello, field)
    assert here != other or field == "work"
    reason = server.reason(server.fitting(**{field: other}))
    assert f"{field} is {short_repr(here)} here and {short_repr(other)} there" in reason


def test_an_engine_that_reaches_itself_is_refused(server: PrefillServer) -> None:
    reason = server.reason(server.fitting(incarnation=server.hello.incarnation))
    assert "incarnation" in reason and "connect to another worker" in reason


def test_a_proof_with_a_key_is_refused_where_there_is_none(server: PrefillServer) -> None:
    reason = server.reason(server.fitting(), Proof(b"x" * 32))
    assert "there is a key there and none here; start both with the same --pd-key" in reason


def test_a_wrong_key_is_refused(tiny_model: Path) -> None:
    with serve(f"--model={tiny_model}", "--pd-key=right", *OPTIONS) as served:
        server = PrefillServer(served)
        for mac in (b"", b"x" * 32):
            assert "--pd-key" in server.reason(server.fitting(), Proof(mac))


def any_bytes(random: Random, hello: bytes) -> bytes:
    """Returns bytes that are no handshake: random, cut off, too long, or a Hello with a few bytes changed."""
    match random.randrange(5):
        case 0:
            return random.randbytes(random.choice([1, 4, 100, 70_000]))
        case 1:
            return frames.frame(hello)[: random.randrange(len(hello))]
        case 2:
            return struct.pack("<I", random.choice([4 * MIB + 1, 1 << 31, (1 << 32) - 1])) + bytes(100)
        case 3:
            return struct.pack("<I", 4 * MIB) + bytes(random.randrange(4 * MIB))  # never completed
        case _:
            changed = bytearray(hello)
            for _ in range(random.randint(1, 4)):
                changed[random.randrange(len(changed))] = random.randrange(256)
            return frames.frame(bytes(changed))


def any_message(random: Random) -> Any:
    """Returns a message behind the handshake, of a kind that a decode engine sends or not."""
    handoff, lease = random.choice([0, 1, -1, 1 << 62]), random.choice([0, 1, -5, 1 << 40])
    return random.choice(
        [
            Claim(handoff=handoff, rid="r" * 50, num_tokens=3, prompt_hash=random.randbytes(32)),
            Grant(handoff=handoff, lease=lease, first_page=-1, pages=random.randbytes(7)),
            Revoke(handoff=handoff, lease=lease, reason="ended", final=True),
            Gone(handoff=handoff, lease=lease, reason="aborted"),
            Sent(handoff=handoff, lease=lease, pages=1, identities=[KVIdentity("v", 1)]),
            Ping(step=-1, busy=True),
            {"no": "message"},
            [["deep"] * 50] * 50,
        ]
    )


def test_strangers_bytes_cost_their_connections_alone(server: PrefillServer) -> None:
    random, hello = Random(1), msgspec.msgpack.encode(server.fitting())
    server.check_serves()
    before = server.resident_mib
    kept: list[socket.socket] = []
    for _ in range(300):
        peer = BarePeer(server.address)
        with suppress(OSError):  # the server may have closed the connection already
            peer.sock.sendall(any_bytes(random, hello))
        if random.random() < 0.3:
            kept.append(peer.sock)  # it stays open, and is given up after some seconds
        else:
            peer.sock.close()
    server.check_serves()
    assert server.resident_mib - before < BOUND_MIB
    for sock in kept:
        sock.close()


def test_unfinished_frames_of_many_strangers_are_bounded(server: PrefillServer) -> None:
    before = server.resident_mib
    with ExitStack() as stack:
        for _ in range(100):
            peer = stack.enter_context(BarePeer(server.address))
            with suppress(OSError):  # a newer one has taken its place
                peer.sock.sendall(struct.pack("<I", 4 * MIB) + b"x" * (4 * MIB - 1))
        server.check_serves()
        assert server.resident_mib - before < BOUND_MIB


def test_what_a_decode_engine_says_wrongly_costs_its_connection_alone(server: PrefillServer) -> None:
    random = Random(2)
    before = server.resident_mib
    for _ in range(60):
        with server.open() as peer, suppress(OSError):
            for _ in range(random.randint(1, 30)):
                peer.send(any_message(random))
            if random.random() < 0.3:
                peer.sock.sendall(random.randbytes(50_000))
    server.check_serves()
    assert server.resident_mib - before < BOUND_MIB


def test_claims_of_requests_that_never_come_are_bounded(server: PrefillServer) -> None:
    before = server.resident_mib
    with server.open() as peer:
        for number in range(3 * MAX_EARLY_CLAIMS):
            peer.send(Claim(handoff=number + 10, rid="r" * 200, num_tokens=3, prompt_hash=bytes(32)))
        while isinstance(first := frames.decode(peer.body()), Ping):
            peer.send(Pong(step=0, busy=False))  # else a busy worker would count this side as lost
        assert isinstance(first, Gone) and first.reason == "unknown", (
            f"{MAX_EARLY_CLAIMS} claims wait, and no more"
        )
    server.check_serves()
    assert server.resident_mib - before < BOUND_MIB
    assert server.served.state()["handover"]["offers"] == {}
