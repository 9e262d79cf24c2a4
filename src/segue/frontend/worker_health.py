"""Judges by their heartbeats whether the workers live."""

from __future__ import annotations

from segue.heartbeat import AwakeClock, heartbeat_period
from segue.messages.control import Heartbeat


class WorkerHealth:
    """Keeps the last heartbeat of each rank, and judges by them. Times are monotonic, in seconds.

    Ages count only time in which this process ran. If it was stopped or busy for long, it has read no
    heartbeats meanwhile, and must receive the next ones before it can judge.
    """

    def __init__(self, num_ranks: int, *, ping_s: float, stall_s: float, now: float) -> None:
        self.period = heartbeat_period(ping_s)
        self._ping_s = ping_s
        self._stall_s = stall_s
        self._clock = AwakeClock(now, 2 * self.period)
        self._last_beats = [0.0] * num_ranks  # when each rank's last one came, by the clock
        self._turns = [0.0] * num_ranks  # seconds of each rank's current turn

    def note(self, beat: Heartbeat, now: float) -> None:
        """Take a heartbeat."""
        self._last_beats[beat.rank] = self._clock.read(now)
        self._turns[beat.rank] = beat.turn_s

    def ages(self, now: float) -> list[float]:
        """Return the seconds since each rank's last heartbeat."""
        awake = self._clock.read(now)
        return [awake - last for last in self._last_beats]

    def verdict(self, now: float) -> str | None:
        """Return why the engine is hung, or None if it is not. Must be called at least once per period."""
        for rank, age in enumerate(self.ages(now)):
            if age > self._ping_s:
                return f"worker rank {rank} has sent no heartbeat for more than {self._ping_s:g} s (--ping-s)"
            if self._turns[rank] > self._stall_s:
                return (
                    f"worker rank {rank} has been at one step for more than {self._stall_s:g} s (--stall-s)"
                )
        return None
