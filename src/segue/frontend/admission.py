"""Whether one more request has a place, decided before it is sent: the scheduler may be in a long step."""

from __future__ import annotations

from segue.errors import OverloadedError
from segue.messages.control import Counters


class Admission:
    """Counts requests that are on their way to the scheduler, which has the last word when they arrive.

    No request is refused here that an idle engine would take.
    """

    def __init__(self, max_queued_requests: int, max_running_requests: int) -> None:
        self._max_queued = max_queued_requests
        self._max_running = max_running_requests
        self._num_sent = 0
        self._num_rejected = 0

    def sent(self) -> None:
        """A request was sent to the scheduler."""
        self._num_sent += 1

    def rejected(self) -> None:
        """The scheduler refused one."""
        self._num_rejected += 1

    def check(self, count: int, num_arriving: int, now: Counters) -> None:
        """Refuse ``count`` more requests while ``num_arriving`` others are not sent yet.

        Raises:
            OverloadedError: more would wait than may.
        """
        on_the_way = self._num_sent - self._num_rejected - now.num_accepted
        waiting = now.num_waiting + max(0, on_the_way) + num_arriving
        # What waits already could not be admitted: then a free slot is no place.
        is_open = now.num_waiting == 0 and now.paused is None
        free = max(0, self._max_running - now.num_running) if is_open else 0
        if waiting + count > self._max_queued + free:
            raise OverloadedError(
                f"{waiting} requests wait, and {count} more would exceed the {self._max_queued} allowed "
                "(--max-queued-requests); retry later"
            )
