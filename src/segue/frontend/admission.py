"""Refuses requests when the queue is full, before they are sent: the scheduler may be in a long step."""

from __future__ import annotations

from segue.errors import OverloadedError
from segue.messages.control import Counters


class Admission:
    """Counts the requests in transit to the scheduler, and refuses requests that would not fit its queue.

    The scheduler makes the final decision. A request that an idle engine would accept is never refused here.
    """

    def __init__(self, max_queued_requests: int, max_running_requests: int) -> None:
        self._max_queued = max_queued_requests
        self._max_running = max_running_requests
        self._num_sent = 0
        self._num_rejected = 0

    def sent(self) -> None:
        self._num_sent += 1

    def rejected(self) -> None:
        self._num_rejected += 1

    def check(self, count: int, num_arriving: int, now: Counters) -> None:
        """Check whether ``count`` more requests fit, while ``num_arriving`` others are not sent yet.

        Raises:
            OverloadedError: more requests would wait than ``max_queued_requests``.
        """
        in_transit = self._num_sent - self._num_rejected - now.num_accepted
        waiting = now.num_waiting + max(0, in_transit) + num_arriving
        # If requests wait already, the scheduler could not admit them: then free slots do not count.
        is_open = now.num_waiting == 0 and now.paused is None
        free = max(0, self._max_running - now.num_running) if is_open else 0
        if waiting + count > self._max_queued + free:
            raise OverloadedError(
                f"{waiting} requests wait, and {count} more would exceed the {self._max_queued} allowed "
                "(--max-queued-requests); retry later"
            )
