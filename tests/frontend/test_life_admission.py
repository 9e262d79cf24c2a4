"""Tests of the frontend's admission of requests."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from segue.errors import OverloadedError
from segue.frontend.life import Admission
from segue.messages.control import Counters
from segue.messages.requests import AddRequest
from tests.frontend.test_tokenizer_manager import Bench, request, run

IDLE = Counters()


def admission(num_sent: int = 0) -> Admission:
    """Make an admission with which ten requests may wait and four may run."""
    made = Admission(10, 4)
    made.num_sent = num_sent
    return made


def is_admitted(made: Admission, count: int, now: Counters = IDLE, *, arriving: int = 0) -> bool:
    try:
        made.check(count, arriving, now)
    except OverloadedError:
        return False
    return True


def test_an_idle_engine_takes_as_many_requests_as_may_wait_and_run() -> None:
    assert is_admitted(admission(), 14)
    assert not is_admitted(admission(), 15)


def test_requests_in_transit_and_in_tokenization_count() -> None:
    assert is_admitted(admission(8), 4, arriving=2)
    assert not is_admitted(admission(8), 5, arriving=2)


def test_accepted_requests_count_as_waiting_or_running() -> None:
    now = Counters(num_accepted=8, num_running=3)
    assert is_admitted(admission(8), 11, now)
    assert not is_admitted(admission(8), 12, now)


def test_a_refused_request_is_no_longer_in_transit() -> None:
    made = admission(14)
    made.num_rejected += 1
    assert is_admitted(made, 1)
    assert not is_admitted(made, 2)


def test_free_slots_do_not_count_while_requests_wait() -> None:
    now = Counters(num_accepted=9, num_waiting=8, num_running=1)
    assert is_admitted(admission(9), 2, now)
    assert not is_admitted(admission(9), 3, now)


def test_free_slots_do_not_count_during_a_pause() -> None:
    assert is_admitted(admission(), 10, Counters(paused="in_place"))
    assert not is_admitted(admission(), 11, Counters(paused="in_place"))


def test_the_refusal_names_the_numbers_and_the_option() -> None:
    with pytest.raises(OverloadedError, match=r"14 requests wait, and 1 .* 10 .*--max-queued-requests"):
        admission(14).check(1, 0, IDLE)


def test_the_manager_refuses_without_sending_anything(tiny_model: Any) -> None:
    async def work() -> None:
        bench = Bench(tiny_model, max_queued_requests=2)  # and four may run
        for index in range(6):
            await bench.submit(request(f"r{index}"))
        with pytest.raises(OverloadedError):
            await bench.submit(request("late"))
        with pytest.raises(OverloadedError):
            await bench.manager.submit([request("a"), request("b")], "batch")
        assert len(bench.sent) == 6
        assert bench.manager.num_requests == 6
        bench.manager.receive(bench.output(Counters(num_accepted=6, num_running=4)))
        await bench.manager.submit([request("a"), request("b")], "batch")
        assert sum(isinstance(message, AddRequest) for message in bench.sent) == 8

    run(work())


def test_a_request_that_is_being_tokenized_takes_a_place(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        bench = Bench(tiny_model, max_queued_requests=1)
        go_on = threading.Event()
        tokenizer = bench.manager.encoder.tokenizer
        assert tokenizer is not None
        monkeypatch.setattr(tokenizer, "encode", lambda *_, **__: go_on.wait(60) and [65])
        long = [asyncio.create_task(bench.submit(request(f"r{n}", "a" * 5000))) for n in range(5)]
        while bench.manager.num_requests < 5:
            await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await bench.submit(request("late"))
        go_on.set()
        await asyncio.gather(*long)

    run(work())
