"""Whether the workers live, judged by their heartbeats."""

from __future__ import annotations

from segue.heartbeat import AwakeClock, heartbeat_period
from segue.messages.control import Heartbeat


class Vitals:
    """The last heartbeat of each rank, and what follows from it. Times are monotonic, in seconds.

    Ages are measured while this process is awake: whoever was stopped, or busy for long, has read no
    heartbeats meanwhile, and must first hear the next ones before it may judge.
    """

    def __init__(self, num_ranks: int, *, ping_s: float, stall_s: float, now: float) -> None:
        self.period = heartbeat_period(ping_s)
        self._ping_s = ping_s
        self._stall_s = stall_s
        self._clock = AwakeClock(now, 2 * self.period)
        self._heard = [0.0] * num_ranks  # when, by the clock
        self._turns = [0.0] * num_ranks  # seconds that each loop has been at its present turn

    def note(self, beat: Heartbeat, now: float) -> None:
        """A heartbeat has come."""
        self._heard[beat.rank] = self._clock.read(now)
        self._turns[beat.rank] = beat.turn_s

    def ages(self, now: float) -> list[float]:
        """Seconds since the last heartbeat, by rank."""
        awake = self._clock.read(now)
        return [awake - heard for heard in self._heard]

    def verdict(self, now: float) -> str | None:
        """Why the engine hangs, as a sentence; None: it does not. To be asked at least once per period."""
        for rank, age in enumerate(self.ages(now)):
            if age > self._ping_s:
                return f"worker rank {rank} has sent no heartbeat for more than {self._ping_s:g} s (--ping-s)"
            if self._turns[rank] > self._stall_s:
                return (
                    f"worker rank {rank} has been at one step for more than {self._stall_s:g} s (--stall-s)"
                )
        return None
