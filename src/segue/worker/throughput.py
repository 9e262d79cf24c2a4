"""The output tokens per second that ``/server_info`` reports."""

from __future__ import annotations


class Throughput:
    """Output tokens per second over the last full window.

    A window ends with the first step that is at least ``WINDOW`` seconds after its beginning.
    """

    WINDOW = 1.0  # seconds

    def __init__(self, now: float) -> None:
        self._since = now
        self._count = 0
        self._last = 0.0

    def add(self, count: int, now: float) -> None:
        """Count ``count`` tokens as generated now."""
        self._count += count
        if (elapsed := now - self._since) >= self.WINDOW:
            self._last = self._count / elapsed
            self._since, self._count = now, 0

    def per_second(self, now: float) -> float:
        """Tokens per second; 0 once the last full window ended two windows ago."""
        return self._last if now - self._since < 2 * self.WINDOW else 0.0
