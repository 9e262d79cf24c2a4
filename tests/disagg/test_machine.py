"""Handing over, under any interleaving of arrivals, transfers, aborts, pauses, commits, kills and cuts."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from segue.disagg import lease_machine
from segue.disagg.leases import Leases
from segue.disagg.machine import TransferMachine
from segue.disagg.offer import Offer
from segue.messages.kv import (
    BanWriters,
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
from segue.messages.requests import SamplingParams
from segue.scheduler.handover import Handover
from segue.scheduler.request import Request
from tests.disagg.bugs import BUGS, PIECE_BUGS
from tests.disagg.cluster import Cluster
from tests.disagg.sides import ADDRESS, HASH, PAGE_SIZE, V1, DecodeSide, FakeHandoverPort, first, hold
from tests.support.kv_hello import hello

TELLING = (3, 9, 10, 27, 38, 46, 51, 62, 130, 134, 190, 207)  # seeds that find the planted bugs, tried first
NUM_SEEDS = 300  # seeds that are tried per planted bug


def run(
    seed: int,
    steps: int,
    transport: str = "shm",
    guides: Random | None = None,
    reuses: Random | None = None,
) -> None:
    """Do random things, then let everything end."""
    random = Random(seed)
    cluster = Cluster(
        random,
        num_prefill=random.choice([1, 2]),
        num_decode=random.choice([1, 2, 2]),
        transport=transport,
        guides=guides,
        reuses=reuses,
    )
    if seed % 4 == 3:
        update_one_after_the_other(cluster, steps)
    else:
        faults, more = random.random() < 0.8, ("role",) if seed % 4 == 2 else ()
        for _ in range(steps):
            cluster.act(faults=faults, more=more)
    cluster.settle()


def update_one_after_the_other(cluster: Cluster, steps: int) -> None:
    """Do random things while the prefill workers serve new weights, and the decode workers do not yet."""
    random = cluster.random
    for _ in range(steps // 75):
        cluster.new_weights("retract" if random.random() < 0.2 else "in_place")
        for workers in (cluster.prefills, cluster.decodes):
            for worker in workers:
                cluster.begin_commit(worker)
            for _ in range(random.choice([50, 150])):
                cluster.act(faults=False, times=(0.01, 0.3, 1.0))


def seeds(num: int, num_slow: int) -> list[Any]:
    """Returns the seeds of so many runs, and of more in the soak."""
    return [*range(num), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(num, num_slow))]


@pytest.mark.parametrize("seed", seeds(24, 60))
def test_every_request_ends_once_and_no_page_is_lost_or_written_by_a_stranger(seed: int) -> None:
    run(seed, 150)


@pytest.mark.parametrize("seed", seeds(16, 60))
def test_the_same_where_guided_requests_wait_until_grammars_can_be_followed(seed: int) -> None:
    run(seed, 200, guides=Random(seed))


@pytest.mark.parametrize("seed", seeds(16, 60))
def test_the_same_where_clients_use_a_handoff_again(seed: int) -> None:
    run(seed, 200, reuses=Random(seed))


def lives(leases: Leases, handoff: int) -> bool:
    return handoff in leases.active


def ends_by_handoff(handover: Handover, request: Request, now: float, ended: Any = Handover.ended) -> None:
    ended(handover, request, now)
    if request.handoff is not None and request.handoff.part == "decode":
        handover.machine.leases.cancel(request.handoff.id, now)


def offer_by_handoff(handover: Handover, request: Request) -> Offer | None:
    has_offer = request.handoff is not None and request.handoff.part == "prefill"
    return handover.machine.offers.by_handoff.get(request.handoff.id) if has_offer else None


@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [
        (Leases, "is_known", lives),
        (Handover, "ended", ends_by_handoff),
        (Handover, "_offer", offer_by_handoff),
    ],
)
def test_a_handoff_that_means_two_requests_is_noticed(
    owner: type, name: str, bug: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, bug)
    for seed in range(NUM_SEEDS):
        try:
            run(seed, 200, reuses=Random(seed))
        except (AssertionError, KeyError):
            return
    pytest.fail(f"{NUM_SEEDS} runs do not notice it")


@pytest.mark.parametrize("seed", seeds(16, 40))
def test_no_request_fails_for_a_change_of_roles(seed: int) -> None:
    random = Random(seed)
    cluster = Cluster(random, num_prefill=2, num_decode=2)
    for _ in range(200):
        cluster.act(faults=False, more=("role",), times=(0.01, 0.2))
    cluster.settle()
    failed = [rid for worker in cluster.workers.values() for rid in worker.errors]
    assert failed == []
    assert cluster.num_role_changes > 0


@pytest.mark.parametrize("seconds", [1.0, 5.0])
def test_a_prefill_step_of_half_a_minute_costs_no_lease(seconds: float) -> None:
    cluster = Cluster(Random(1), num_prefill=1, num_decode=1)
    (prefill,), (decode,) = cluster.prefills, cluster.decodes
    cluster.has_checksums = False
    cluster.handoffs["r"] = 1, [*range(20)], SamplingParams(max_new_tokens=5), prefill.name
    cluster.prefill_leg("r")
    cluster.decode_leg("r", decode)
    while not prefill.pushes:
        if not prefill.results:
            prefill.launch()
        decode.launch()
        for worker in (prefill, decode):
            cluster.flush(worker)
        for connection, end in cluster.pending():
            cluster.deliver(connection, end)
    assert prefill.results, "a push waits for a step"
    (connection,) = cluster.connections
    for _ in range(int(30 / seconds)):  # the loop of the prefill worker waits meanwhile
        cluster.now += seconds
        cluster.advance(decode)
        cluster.ping(connection)
    prefill.now = cluster.now
    cluster.settle()
    assert decode.scheduler.handover.counters().num_adopted == 1


@pytest.mark.parametrize("seed", [*seeds(24, 60), 119, 207, 251, 276])  # in the last ones pages are dropped
def test_the_same_where_nothing_proves_that_a_writer_has_gone(seed: int) -> None:
    run(seed, 150, "nixl")


def test_pages_that_are_used_too_early_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_machine, "LOST_S", 1.0)
    for seed in (116, *range(NUM_SEEDS)):  # the first one tells, as long as nothing else changes
        try:
            run(seed, 150, "nixl")
        except AssertionError as error:
            assert "is written, but no lease of this peer has it" in str(error)
            return
    pytest.fail(f"{NUM_SEEDS} runs do not notice it")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_the_same_over_many_steps(seed: int) -> None:
    run(seed, 500)


@pytest.mark.parametrize("name", [*BUGS, *PIECE_BUGS])
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (BUGS | PIECE_BUGS)[name](monkeypatch)
    for seed in (*TELLING, *range(NUM_SEEDS)):
        try:
            run(seed, 150, "nixl" if name in PIECE_BUGS else "shm")
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
                machine.on_rank(PushEnded(ticket=random.choice(pushes), at=now), now)
            case _:
                machine.on_message(number, any_message(random), now)
        machine.advance(now)
    for handoff in list(running):
        end(handoff, 100.0)
    for offer in list(offers):
        for ticket in list(offer.pushes):
            machine.on_rank(PushEnded(ticket=ticket, at=100.0), 100.0)
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


@pytest.mark.parametrize(("transport", "asks"), [("shm", True), ("nixl", False)])
def test_ranks_are_asked_for_proof_where_they_can_give_it(transport: str, asks: bool) -> None:
    machine = TransferMachine(FakeHandoverPort(), page_size=PAGE_SIZE, num_ranks=1)
    machine.on_opened(1, "s1", ADDRESS, hello("prefill"), transport, 0.0)
    machine.on_closed(1, 0.0)
    assert machine.peers.commands == ([BanWriters(session="s1")] if asks else [])
