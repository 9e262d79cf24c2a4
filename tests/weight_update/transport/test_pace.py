"""The share of the time that receives over NCCL may take while the engine generates."""

from __future__ import annotations

import pytest

from segue.weight_update.transport.pace import MAX_PAUSE_S, SLICE_BYTES, ReceivePace


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def received(pace: ReceivePace, clock: Clock, sizes: list[int], bytes_per_s: float) -> float:
    """Receives broadcasts of these sizes at a speed; returns the seconds in which a receive was posted."""
    busy, pending = 0.0, 0
    for size in sizes:
        while not pace.may_post(size):
            if pending:  # the slice is full: it is received, and then it ends
                clock.now += pending / bytes_per_s
                busy += pending / bytes_per_s
                pending = 0
                pace.drained()
            else:
                clock.now += 0.0001
        pace.posted(size)
        pending += size
    clock.now += pending / bytes_per_s
    pace.drained()
    return busy + pending / bytes_per_s


@pytest.mark.parametrize("sizes", [[1 << 30] * 16, [40 << 20] * 400, [7] * 1000 + [600 << 20] * 20])
@pytest.mark.parametrize("share", [0.05, 0.15, 0.5])
def test_receives_take_no_more_than_their_share(sizes: list[int], share: float, clock: Clock) -> None:
    began = clock.now
    pace = ReceivePace(share, lambda: True, clock=clock)
    busy = received(pace, clock, sizes, bytes_per_s=300e9)
    # Behind the last slice nothing is posted, so its pause is not among the seconds that have passed.
    last = max(SLICE_BYTES, *sizes) / 300e9
    took = clock.now - began + last * (1 / share - 1)
    assert busy <= share * took * 1.001
    assert took <= busy / share * 1.1, "and no longer than that needs"


def test_without_requests_there_is_no_limit(clock: Clock) -> None:
    generates = True
    pace = ReceivePace(0.1, lambda: generates, clock=clock)
    pace.posted(SLICE_BYTES)
    assert not pace.may_post(1), "the slice is full"
    clock.now += 1e-3
    pace.drained()
    assert not pace.may_post(1)
    generates = False
    assert pace.may_post(1 << 40)


def test_a_share_of_one_is_no_limit(clock: Clock) -> None:
    pace = ReceivePace(1.0, lambda: True, clock=clock)
    pace.posted(SLICE_BYTES)
    assert pace.may_post(1 << 40)


def test_a_trainer_that_is_slow_is_not_slowed_down_much_further(clock: Clock) -> None:
    pace = ReceivePace(0.1, lambda: True, clock=clock)
    pace.posted(1)
    clock.now += 5.0  # the trainer gathers its tensors
    pace.drained()
    clock.now += MAX_PAUSE_S - 1e-6
    assert not pace.may_post(1)
    clock.now += 2e-6
    assert pace.may_post(1)
