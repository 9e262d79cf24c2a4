"""How often a test looks whether a condition holds."""

from __future__ import annotations

import time

SHORTEST_S, LONGEST_S = 0.005, 0.025


def rest(began: float) -> None:
    """Sleep before the next look: 5 ms, and in a long wait up to 25 ms.

    A look often is a request to a server that is about to do what the test waits for, on the same cores.

    Args:
        began: when the wait began, by ``time.monotonic``.
    """
    time.sleep(min(max(SHORTEST_S, (time.monotonic() - began) / 20), LONGEST_S))
