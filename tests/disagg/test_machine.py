"""Handing over, under any interleaving of arrivals, transfers, aborts, pauses, commits, kills and cuts."""

from __future__ import annotations

from random import Random

import pytest

from segue.disagg.machine import TransferMachine
from segue.messages.kv import (
    Claim,
    Gone,
    Grant,
    KVMessage,
    PromptLogprobs,
    Pushed,
    PushEnded,
    ReservePages,
    Revoke,
    Sent,
    WritersGone,
)
from tests.disagg.bugs import BUGS
from tests.disagg.cluster import Cluster
from tests.disagg.sides import ADDRESS, HASH, PAGE_SIZE, V1, DecodeSide, FakeHandoverPort, first, hold
from tests.support.kv_hello import hello

TELLING = (0, 1, 4, 7, 11, 23, 29, 45)  # seeds that find most of the planted bugs, which are tried first
NUM_SEEDS = 300  # seeds that are tried per planted bug


def run(seed: int, steps: int) -> None:
    """Do random things, then let everything end."""
    random = Random(seed)
    cluster = Cluster(random, num_prefill=random.choice([1, 2]), num_decode=random.choice([1, 2]))
    faults = random.random() < 0.8
    for _ in range(steps):
        cluster.act(faults=faults)
    cluster.settle()


@pytest.mark.parametrize("seed", range(60))
def test_every_request_ends_once_and_no_page_is_lost_or_written_by_a_stranger(seed: int) -> None:
    run(seed, 150)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_the_same_over_many_steps(seed: int) -> None:
    run(seed, 500)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name](monkeypatch)
    for seed in (*TELLING, *range(NUM_SEEDS)):
        try:
            run(seed, 150)
        except (AssertionError, KeyError, IndexError):
            return
    pytest.fail(f"{NUM_SEEDS} runs do not notice it")


def any_message(random: Random) -> KVMessage:
    """Returns any message about one of a few handoffs and leases, whether it may be said now or not."""
    handoff, lease = random.randint(1, 3), random.randint(-1, 4)
    messages: list[KVMessage] = [
        Claim(handoff=handoff, rid="r", num_tokens=random.randint(-1, 9), prompt_hash=HASH),
        Grant(
            handoff=handoff,
            lease=lease,
            first_page=random.randint(-1, 3),
            pages=bytes(random.choice([0, 4, 8, 12, 12, 12, 13])),
        ),
        Revoke(handoff=handoff, lease=lease, reason="ended", final=random.random() < 0.5),
        ReservePages(handoff=handoff, lease=lease, num_tokens=random.choice([10, 10, 10, -1])),
        Pushed(handoff=handoff, lease=lease, pages=random.randint(-1, 4)),
        PromptLogprobs(handoff=handoff, part=random.randint(-1, 1), entries=[]),
        first(handoff, parts=random.choice([0, 0, 0, 1, -1])),
        Sent(handoff=handoff, lease=lease, pages=3, identities=random.choice([[], [V1]])),
        Gone(handoff=handoff, lease=lease, reason="expired", again=random.random() < 0.5),
    ]
    return random.choice([*messages, *messages[:2], *messages[:2]])  # a connection has to get far


@pytest.mark.parametrize("seed", range(10))
def test_whatever_a_decode_worker_says_the_prefill_worker_goes_on(seed: int) -> None:
    random, port = Random(seed), FakeHandoverPort()
    machine = TransferMachine(port, page_size=PAGE_SIZE, num_ranks=1)
    offers, peer, num_added = machine.offers, hello("decode"), 0
    running: dict[int, int] = {}  # handoff -> tokens that are launched

    def end(handoff: int, now: float) -> None:
        if running.pop(handoff) == 10 and random.random() < 0.7:
            offers.first(first(handoff, random.choice([None, "stop"])), now)
        if not offers.take_over(handoff, held := hold(11, 12, 13)):
            port.release(held)
        offers.request_ended(handoff, now)

    for step in range(300):
        now = step * 0.1
        if peer.incarnation not in machine.peers.open:
            machine.on_opened(step, f"s{step}", None, peer, "shm", now)
        number = machine.peers.open[peer.incarnation].number
        match random.randrange(12):
            case 0 if not offers.is_known(handoff := random.randint(1, 3)) and handoff not in running:
                offers.add(handoff, f"r{handoff}", 10, HASH, now)
                running[handoff], num_added = 0, num_added + 1
            case 1 if begun := [handoff for handoff, count in running.items() if count < 10]:
                handoff = random.choice(begun)
                running[handoff] = random.choice([4, 10])
                offers.launched(handoff, running[handoff], step, V1, now)
            case 3 if running:
                end(random.choice(list(running)), now)
            case 4 if pushes := [ticket for offer in offers for ticket in offer.pushes]:
                machine.on_rank(PushEnded(ticket=random.choice(pushes)), now)
            case _:
                machine.on_message(number, any_message(random), now)
        machine.advance(now)
    for handoff in list(running):
        end(handoff, 100.0)
    for offer in list(offers):
        for ticket in list(offer.pushes):
            machine.on_rank(PushEnded(ticket=ticket), 100.0)
    for now in (200.0, 300.0):
        machine.advance(now)
    assert list(offers) == [] and len(port.home) == 3 * num_added, "all pages are home, once"


@pytest.mark.parametrize("seed", range(10))
def test_whatever_a_prefill_worker_says_the_decode_worker_goes_on(seed: int) -> None:
    random, port = Random(seed), FakeHandoverPort()
    machine = TransferMachine(port, page_size=PAGE_SIZE, num_ranks=1)
    leases, peer, num_taken = machine.leases, hello("prefill"), 0
    for step in range(300):
        now = step * 0.1
        if peer.incarnation not in machine.peers.open:
            machine.on_opened(step, f"s{step}", ADDRESS, peer, "shm", now)
        number = machine.peers.open[peer.incarnation].number
        match random.randrange(12):
            case 0 | 1 if (handoff := random.randint(1, 3)) not in leases.active:
                leases.claim(DecodeSide().new_lease(handoff), now)
            case 2:
                port.room.append(hold(21, 22, 23))
                leases.grant_all(now)
                num_taken += not port.room
                port.room = []
            case 3 if landed := leases.landed:
                lease = leases.adopted(random.choice(landed).handoff, now)
                assert lease.hold is not None
                port.release(lease.hold)
            case 4:
                leases.cancel(random.randint(1, 3), now)
            case 5:
                leases.take_back_all("memory", now)
            case _:
                machine.on_message(number, any_message(random), now)
        machine.advance(now)
    for handoff in (1, 2, 3):
        leases.cancel(handoff, 100.0)
    for open_peer in list(machine.peers.open.values()):
        machine.on_closed(open_peer.number, 100.0)
    for session in {lease.session for lease in leases}:
        machine.on_rank(WritersGone(session=session), 100.0)
    assert list(leases) == [] and len(port.home) == 3 * num_taken, "all pages are home, once"
