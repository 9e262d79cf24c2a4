"""What the scheduler does with the pages of offers and leases."""

from __future__ import annotations

from typing import Any

import pytest

from segue.disagg.lease import LOST_S
from segue.messages.guided import GrammarSpec
from segue.messages.kv import First, KVIdentity, ReservePages, Sent
from segue.messages.requests import Handoff, SamplingParams
from tests.disagg.cluster import Worker
from tests.scheduler.simulation import next_token, prefix_of
from tests.support.kv_hello import hello

ADDRESS = "127.0.0.1:8998"


def lessee(transport: str, **params: Any) -> Worker:
    """Returns a decode worker half of whose ten pages a prefill worker may write to."""
    worker = Worker("d0", "decode", "d0#1", page_size=4, num_pages=10, max_seq_len=40, max_running_requests=4)
    worker.machine.on_opened(1, "s1", ADDRESS, hello("prefill"), transport, 0.0)
    handoff = Handoff(id=1, part="decode", peer=ADDRESS, whole=True)
    assert worker.start("first", [1] * 20, SamplingParams(**{"max_new_tokens": 1} | params), handoff)
    worker.machine.on_message(1, ReservePages(handoff=1, lease=1, num_tokens=20), 0.0)
    assert worker.launch() is None, "nothing runs, and the pages are granted"
    return worker


@pytest.fixture
def decode() -> Worker:
    """A decode worker half of whose ten pages a lost prefill worker may still write to."""
    worker = lessee("shm")
    worker.machine.on_closed(1, 0.0)
    run(worker)
    assert worker.finished["first"].reason == "length", "it computes the prompt in the other half"
    assert [lease.state.name for lease in worker.machine.leases] == ["QUARANTINED"]
    return worker


def run(worker: Worker) -> None:
    """Run steps until there is nothing to do."""
    worker.scheduler.now = worker.now
    while worker.launch() is not None:
        worker.apply()
    worker.take_replies()


def test_a_prompt_that_needs_lost_pages_waits_for_a_while_and_fails(decode: Worker) -> None:
    decode.start("r", [2] * 30, SamplingParams(max_new_tokens=1), None)
    decode.now = LOST_S - 1
    run(decode)
    assert "r" not in decode.finished, "the pages may still come home"
    decode.now = LOST_S
    run(decode)
    assert decode.errors == {"r": "KVCapacityLostError"}
    assert ADDRESS in (decode.finished["r"].message or "")
    decode.check_memory()


def test_a_prompt_that_needs_lost_pages_runs_once_they_come_home(decode: Worker) -> None:
    decode.start("r", [2] * 30, SamplingParams(max_new_tokens=1), None)
    run(decode)
    decode.machine.leases.writers_gone("s1", 1.0)
    run(decode)
    assert decode.finished["r"].reason == "length"


def test_a_prompt_fails_too_if_the_prefill_worker_is_connected_and_its_last_word_is_overdue() -> None:
    worker = lessee("shm")
    worker.abort("first")
    worker.start("r", [2] * 30, SamplingParams(max_new_tokens=1), None)
    worker.now = LOST_S - 1
    run(worker)
    assert "r" not in worker.finished and [each.state.name for each in worker.machine.leases] == ["REVOKED"]
    worker.now = LOST_S
    run(worker)
    assert worker.errors == {"r": "KVCapacityLostError"}
    worker.check_memory()


def test_a_running_request_that_needs_lost_pages_waits_for_a_while_and_fails(decode: Worker) -> None:
    decode.start("r", [2] * 16, SamplingParams(max_new_tokens=10), None)
    run(decode)
    assert "r" in decode.scheduler.running and "r" not in decode.finished
    decode.now = LOST_S
    run(decode)
    assert decode.errors == {"r": "KVCapacityLostError"}
    decode.check_memory()


def test_a_prompt_that_fits_beside_lost_pages_runs(decode: Worker) -> None:
    decode.now = LOST_S
    decode.start("r", [2] * 10, SamplingParams(max_new_tokens=8), None)
    run(decode)
    assert decode.finished["r"].reason == "length"


def test_a_prompt_waits_for_pages_that_are_kept_for_a_while() -> None:
    worker = lessee("nixl")
    worker.abort("first")
    worker.machine.on_closed(1, 10.0)  # from now on it is known when the pages come home
    worker.start("r", [2] * 30, SamplingParams(max_new_tokens=1), None)
    worker.now = LOST_S + 5.0
    run(worker)
    assert "r" not in worker.finished and worker.scheduler.handover.owns_pages
    worker.now = LOST_S + 10.0
    worker.machine.advance(worker.now)
    run(worker)
    assert worker.finished["r"].reason == "length"


def test_a_running_request_that_needs_pages_of_a_guided_one_goes_on_once_grammars_can_be_followed() -> None:
    """The pages have landed, and nothing but the scheduler's own clock wakes the loop then."""
    worker = lessee("shm", max_new_tokens=2, grammar=GrammarSpec("regex", "a"))
    worker.scheduler.can_guide = False
    token = next_token([1] * 20, 0)
    first = First(handoff=1, token=token, version="0", cached_tokens=0, seed=0)
    for message in (first, Sent(handoff=1, lease=1, pages=5, identities=[KVIdentity("0", 0)])):
        worker.machine.on_message(1, message, 0.0)
    ((_, hold),) = worker.machine.leases.holds()
    for position in range(20):
        entry = prefix_of([1] * (position + 1)), "0"
        worker.device.kv[hold.own_pages[position // 4], position % 4] = entry
    worker.start("r", [2] * 16, SamplingParams(max_new_tokens=10), None)
    run(worker)
    assert "r" in worker.scheduler.running and worker.scheduler.wake_at is not None
    worker.scheduler.can_guide = True
    run(worker)
    assert {end.reason for end in worker.finished.values()} == {"length"} and len(worker.finished) == 2
