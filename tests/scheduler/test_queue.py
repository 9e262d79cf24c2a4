"""The waiting queue: classes apart, each in order."""

from __future__ import annotations

from random import Random

import pytest

from segue.laps.classes import PromptClass
from segue.messages.requests import SamplingParams
from segue.scheduler.queue import WaitingQueue
from segue.scheduler.request import Request


def request(number: int, prompt_class: PromptClass = "short", priority: int = 0) -> Request:
    return Request(
        rid=str(number),
        params=SamplingParams(max_new_tokens=1),
        tokens=[1],
        prompt_len=1,
        most_outputs=1,
        priority=priority,
        arrival=number,
        added_at=0.0,
        has_begun=False,
        prompt_class=prompt_class,
    )


def rids(queue: WaitingQueue) -> list[str]:
    return [each.rid for each in queue]


def test_short_prompts_come_before_long_ones_and_each_class_is_in_order() -> None:
    queue = WaitingQueue()
    assert not queue and list(queue) == []
    for each in (request(3), request(1, "long"), request(4, priority=1), request(2), request(0, "long")):
        queue.add(each)
    assert rids(queue) == ["4", "2", "3", "0", "1"] and len(queue) == 5
    assert [each.rid for each in queue.of("long")] == ["0", "1"]


@pytest.mark.parametrize("seed", range(3))
def test_requests_leave_from_anywhere(seed: int) -> None:
    random, queue = Random(seed), WaitingQueue()
    left = [request(i, random.choice(["short", "long"]), random.randrange(3)) for i in range(100)]
    for each in left:
        queue.add(each)
    random.shuffle(left)
    while left:
        queue.remove(left.pop())
        assert set(rids(queue)) == {each.rid for each in left}
    assert not queue
