"""Whether an engine's workers live, by their heartbeats and answers, and whether its queue has room."""

from __future__ import annotations

from dataclasses import dataclass

from segue.errors import OverloadedError
from segue.heartbeat import AwakeClock, heartbeat_period
from segue.messages.control import Counters, Heartbeat


class WorkerHealth:
    """Keeps the last heartbeat of each rank, and judges by them. Times are monotonic, in seconds.

    Ages count only time in which this process ran. If it was stopped or busy for long, it has read no
    heartbeats meanwhile, and must receive the next ones before it can judge.
    """

    def __init__(self, num_ranks: int, *, ping_s: float, stall_s: float, now: float) -> None:
        """Allow each rank ``ping_s`` seconds of silence, and its loop ``stall_s`` seconds per turn."""
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


@dataclass(slots=True)
class Admission:
    """Counts the requests in transit to the scheduler, and refuses requests that would not fit its queue.

    It does so before they are sent, because the scheduler may be in a long step. The scheduler decides in the
    end. A request that an idle engine would accept is never refused here.
    """

    max_queued_requests: int
    max_running_requests: int
    num_sent: int = 0
    num_rejected: int = 0

    def check(self, count: int, num_arriving: int, now: Counters) -> None:
        """Check whether ``count`` more requests fit, while ``num_arriving`` others are not sent yet.

        Raises:
            OverloadedError: more requests would wait than ``max_queued_requests``.
        """
        # Requests that were sent, and that the scheduler's last output does not count yet.
        in_transit = self.num_sent - self.num_rejected - now.num_accepted
        waiting = now.num_waiting + max(0, in_transit) + num_arriving
        # If requests wait already, the scheduler could not admit them: then free slots do not count.
        is_open = now.num_waiting == 0 and now.paused is None
        free = max(0, self.max_running_requests - now.num_running) if is_open else 0
        allowed = self.max_queued_requests
        if waiting + count > allowed + free:
            raise OverloadedError(
                f"{waiting} requests wait, and {count} more would exceed the {allowed} allowed "
                "(--max-queued-requests); retry later"
            )
