"""Whether a step of short prompts should wait a little for further ones: the adaptive waiting window.

A step of few tokens costs about as much as one of some more, so two prompts that arrive within a few
milliseconds of each other are computed sooner together than one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import exp

MEMORY_S = 1.0  # arrivals this long ago count 1/e of a new one
WORTH = 0.3  # arrivals expected within the shortest step; fewer of them are not worth waiting for
FIRST_DEPTH, MAX_DEPTH = 2, 32


@dataclass(slots=True)
class Rate:
    """Events per second, the last ones above all."""

    memory_s: float = MEMORY_S
    _sum: float = 0.0
    _at: float = 0.0

    def add(self, now: float, amount: float = 1.0) -> None:
        """Count an event; ``amount``: what it counts for."""
        self._sum = self.per_second(now) + amount / self.memory_s
        self._at = now

    def per_second(self, now: float) -> float:
        """Returns the sum of the amounts per second."""
        return self._sum * exp((self._at - now) / self.memory_s)


@dataclass(slots=True)
class Window:
    """Decides how long a step of short prompts is put off. It waits only if that delays nobody else.

    It waits for ``depth`` prompts: twice as many as the last time if they came in time, and otherwise as many
    as had come.
    """

    seconds: float  # the longest wait; 0: never wait
    depth: int = FIRST_DEPTH
    waited_s: float = 0.0  # in total
    _since: float | None = field(default=None)
    _until: float = 0.0

    def until(self, count: int, *, slack: float, rate: float, shortest: float, now: float) -> float | None:
        """Returns when to look again; None: launch now.

        Args:
            count: short prompts that wait.
            slack: seconds that the first of them has left to its deadline.
            rate: short prompts that arrive per second.
            shortest: seconds of the shortest step.
            now: the time, in seconds.
        """
        if self._since is not None and now > self._until + self.seconds:
            self.stop(now)  # nobody asked in time: the engine was paused, or had no work
        since = now if self._since is None else self._since
        until = since + min(self.seconds, slack)
        if count >= self.depth:
            if self._since is not None:
                self.depth = min(2 * self.depth, MAX_DEPTH)
        elif now >= until:
            if self._since is not None:
                self.depth = max(count, FIRST_DEPTH)
        elif rate * (until - now) >= 1 and rate * shortest > WORTH:
            self._since, self._until = since, until
            return until
        self.stop(now)
        return None

    def stop(self, now: float) -> None:
        """End a wait, if there is one."""
        if self._since is not None:
            self.waited_s += min(now, self._until) - self._since
            self._since = None
