"""Which requests have no place, as the frontend can tell."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from segue.errors import OverloadedError
from segue.frontend.admission import Admission
from segue.messages.control import Counters
from segue.messages.requests import AddRequest
from tests.frontend.test_tokenizer_manager import Bench, request, run

IDLE = Counters()


def admission(num_sent: int = 0) -> Admission:
    """Ten may wait, four may run."""
    made = Admission(10, 4)
    for _ in range(num_sent):
        made.sent()
    return made


def has_place(made: Admission, count: int, now: Counters = IDLE, *, arriving: int = 0) -> bool:
    try:
        made.check(count, arriving, now)
    except OverloadedError:
        return False
    return True


def test_an_idle_engine_takes_as_many_as_may_wait_and_run() -> None:
    assert has_place(admission(), 14)
    assert not has_place(admission(), 15)


def test_those_on_their_way_and_those_being_tokenized_count() -> None:
    assert has_place(admission(8), 4, arriving=2)
    assert not has_place(admission(8), 5, arriving=2)


def test_those_that_the_scheduler_has_taken_count_where_they_are() -> None:
    now = Counters(num_accepted=8, num_running=3)
    assert has_place(admission(8), 11, now)
    assert not has_place(admission(8), 12, now)


def test_what_the_scheduler_refused_is_no_longer_on_its_way() -> None:
    made = admission(14)
    made.rejected()
    assert has_place(made, 1)
    assert not has_place(made, 2)


def test_a_free_slot_is_no_place_while_others_wait_for_it() -> None:
    now = Counters(num_accepted=9, num_waiting=8, num_running=1)
    assert has_place(admission(9), 2, now)
    assert not has_place(admission(9), 3, now)


def test_a_free_slot_is_no_place_during_a_pause() -> None:
    assert has_place(admission(), 10, Counters(paused="in_place"))
    assert not has_place(admission(), 11, Counters(paused="in_place"))


def test_the_refusal_names_the_numbers_and_the_option() -> None:
    with pytest.raises(OverloadedError, match=r"14 requests wait, and 1 .* 10 .*--max-queued-requests"):
        admission(14).check(1, 0, IDLE)


def test_the_manager_refuses_without_sending_anything(tiny_model: Any) -> None:
    async def work() -> None:
        bench = Bench(tiny_model, max_queued_requests=2)  # and four may run
        for index in range(6):
            await bench.manager.submit(request(f"r{index}"))
        with pytest.raises(OverloadedError):
            await bench.manager.submit(request("late"))
        with pytest.raises(OverloadedError):
            await bench.manager.submit_batch([request("a"), request("b")], "batch")
        assert len(bench.sent) == 6
        assert bench.manager.num_requests == 6
        bench.manager.receive(bench.output(Counters(num_accepted=6, num_running=4)))
        await bench.manager.submit_batch([request("a"), request("b")], "batch")
        assert sum(isinstance(message, AddRequest) for message in bench.sent) == 8

    run(work())


def test_a_request_that_is_being_tokenized_has_its_place(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        bench = Bench(tiny_model, max_queued_requests=1)
        go_on = threading.Event()
        tokenizer = bench.manager.tokenizer
        assert tokenizer is not None
        monkeypatch.setattr(tokenizer, "encode", lambda *_, **__: go_on.wait(10) and [65])
        long = [asyncio.create_task(bench.manager.submit(request(f"r{n}", "a" * 5000))) for n in range(5)]
        while bench.manager.num_requests < 5:
            await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await bench.manager.submit(request("late"))
        go_on.set()
        await asyncio.gather(*long)

    run(work())
