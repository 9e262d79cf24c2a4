"""Tests of heartbeats: their contents, and the time that does not count."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from segue.heartbeat import AwakeClock, Turn, heartbeat_period, send_heartbeats
from segue.messages.control import Heartbeat, SchedulerMessage


def test_the_period_leaves_room_for_heartbeats_that_come_late() -> None:
    assert [heartbeat_period(ping_s) for ping_s in (0.5, 5.0, 60.0)] == [0.1, 1.0, 1.0]


def test_a_long_gap_between_two_readings_counts_as_a_short_time() -> None:
    clock = AwakeClock(100.0, most=2.0)
    assert [clock.read(now) for now in (101.0, 101.5, 4000.0, 4001.0)] == [1.0, 1.5, 3.5, 4.5]


def test_a_clock_does_not_go_back() -> None:
    clock = AwakeClock(100.0, most=2.0)
    assert [clock.read(now) for now in (101.0, 99.0, 99.5)] == [1.0, 1.0, 1.5]


def test_a_turn_is_measured_from_when_it_is_first_seen() -> None:
    turn = Turn()
    clock = AwakeClock(10.0, most=2.0)
    assert turn.seconds(clock.read(11.0)) == 0.0
    turn.since = 11.5
    assert [turn.seconds(clock.read(now)) for now in (12.0, 13.0, 14.0)] == [0.0, 1.0, 2.0]
    turn.since = 14.5  # the next one
    assert [turn.seconds(clock.read(now)) for now in (15.0, 16.0)] == [0.0, 1.0]
    turn.rest()
    assert turn.seconds(clock.read(17.0)) == 0.0


def test_a_process_that_was_stopped_in_a_step_has_not_stalled() -> None:
    turn = Turn()
    clock = AwakeClock(10.0, most=2.0)
    turn.since = 10.5
    turn.seconds(clock.read(11.0))
    assert turn.seconds(clock.read(611.0)) == 2.0


@pytest.fixture
def socket() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.PULL) as pull:
        pull.setsockopt(zmq.LINGER, 0)
        pull.setsockopt(zmq.RCVTIMEO, 10_000)
        pull.bind("inproc://frontend")
        yield pull


def beats(socket: zmq.Socket[bytes], until: Any) -> Heartbeat:
    """Return the first heartbeat for which ``until`` is true."""
    deadline = time.monotonic() + 10
    while True:
        beat = msgspec.msgpack.decode(socket.recv(), type=SchedulerMessage)
        assert isinstance(beat, Heartbeat)
        if until(beat):
            return beat
        assert time.monotonic() < deadline, f"the last heartbeat was {beat}"


def test_heartbeats_report_a_busy_loop_and_a_waiting_one(socket: zmq.Socket[bytes]) -> None:
    with send_heartbeats(socket.context, "inproc://frontend", 3, ping_s=0.05) as turn:
        assert beats(socket, lambda _: True).rank == 3
        turn.begin()
        beats(socket, lambda beat: beat.turn_s > 0.05)
        turn.rest()
        beats(socket, lambda beat: beat.turn_s == 0.0)


def test_a_frontend_that_does_not_read_does_not_stop_the_pulse(socket: zmq.Socket[bytes]) -> None:
    socket.context.sndhwm = socket.context.rcvhwm = 1
    with send_heartbeats(socket.context, "inproc://nowhere", 0, ping_s=0.005):
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "segue-pulse"]
        deadline = time.monotonic() + 0.1
        while time.monotonic() < deadline:
            assert thread.is_alive()
            time.sleep(0.001)
    assert not thread.is_alive()


class ClearedLate(threading.Event):
    """An event that is set between the end of a wait and `clear`."""

    def __init__(self) -> None:
        super().__init__()
        self.is_due = threading.Event()

    def clear(self) -> None:
        self.is_due.set()
        self.wait(20)
        super().clear()


def test_the_pulse_ends_even_if_it_was_about_to_send_a_heartbeat(socket: zmq.Socket[bytes]) -> None:
    heartbeats = send_heartbeats(socket.context, "inproc://nowhere", 0, ping_s=0.005)
    turn = heartbeats.__enter__()
    turn.hurry = hurry = ClearedLate()
    assert hurry.is_due.wait(20)
    end = threading.Thread(target=heartbeats.__exit__, args=(None, None, None), daemon=True)
    end.start()
    end.join(20)
    assert not end.is_alive()
