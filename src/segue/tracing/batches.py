"""A thread that sends spans in batches. Whoever gives it spans never waits, whatever the collector does."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from segue.logs import logger
from segue.tracing.spans import EndedSpan

MOST_WAITING = 8192  # spans, beyond which further ones are lost
MOST_BATCH = 512  # spans that are sent together
GATHER_S = 1.0  # from the first span of a batch until it is sent
FLUSH_S = 2.0  # that a shutdown waits for the spans that are there
STOP_S = 0.5  # that it waits, behind that, for the thread


class SpanBatches:
    """Sends spans to one place."""

    def __init__(
        self, place: str, send: Callable[[Sequence[EndedSpan]], str | None], stop: Callable[[], None]
    ) -> None:
        """Start the thread.

        Args:
            place: that spans are sent to, for the log.
            send: sends a batch, and may take seconds; returns why it could not.
            stop: makes a ``send`` that waits return soon.
        """
        self.num_lost = 0
        self._place = place
        self._send = send
        self._stop = stop
        self._waiting: deque[EndedSpan] = deque()
        self._is_failing = False
        self._wake, self._closing = threading.Event(), threading.Event()
        self._gives_up = threading.Event()  # what is there is not sent any more
        self._thread = threading.Thread(target=self._run, name="segue-spans", daemon=True)
        self._thread.start()

    def put(self, spans: Sequence[EndedSpan]) -> None:
        """Take spans to be sent; they are lost if too many wait already. It never waits."""
        if len(self._waiting) + len(spans) > MOST_WAITING or self._closing.is_set():
            self.num_lost += len(spans)
            return
        self._waiting.extend(spans)
        if not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """Send what is there, for at most ``FLUSH_S`` seconds, and end the thread. May be called again."""
        self._closing.set()
        self._wake.set()
        self._thread.join(FLUSH_S)
        self._gives_up.set()
        self._stop()
        self._thread.join(STOP_S)
        if self._waiting:
            logger.warning("%d spans were not sent to %s before the end", len(self._waiting), self._place)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._wake.wait()
            self._closing.wait(GATHER_S)
            self._wake.clear()
            while self._waiting and not self._gives_up.is_set():
                batch = [self._waiting.popleft() for _ in range(min(MOST_BATCH, len(self._waiting)))]
                self._note(self._send(batch), len(batch))

    def _note(self, failure: str | None, number: int) -> None:
        """Count spans that were lost, and log when it begins and when it ends."""
        if failure is not None:
            self.num_lost += number
            if not self._is_failing:
                text = "spans cannot be sent to %s, and are lost until that works again: %s"
                logger.warning(text, self._place, failure)
        elif self._is_failing:
            logger.info("spans are sent to %s again; %d were lost", self._place, self.num_lost)
        self._is_failing = failure is not None
