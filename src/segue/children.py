"""What processes that start others need: where a child finds this package, how it ended, when it restarts."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartRule:
    """When a process is started again: at once, but after ever longer pauses if it dies again and again.

    How it died says nothing: a process that is killed by SIGKILL may have taken too much memory. How long it
    was ready does. One that was ready for ``steady_s``, and for as long as its start took, was of use, so its
    earlier deaths are forgotten. Its starts then take at most half of the time.
    """

    backoff_s: float = 0.5  # before the second start in a row; before each further one twice as long
    max_backoff_s: float = 30.0
    steady_s: float = 5.0

    def count(self, num_deaths: int, start_s: float, ready_s: float) -> int:
        """Return the number of deaths in a row, this one included.

        Args:
            num_deaths: the number before this death.
            start_s: how long the process took to be ready.
            ready_s: how long it was ready; 0: it never was.
        """
        return 1 if ready_s >= max(self.steady_s, start_s) else num_deaths + 1

    def pause_s(self, num_deaths: int) -> float:
        """Return the seconds before the start that follows the last of ``num_deaths`` in a row."""
        if num_deaths <= 1:
            return 0.0
        doublings = min(num_deaths - 2, 30)  # the longest time is reached long before
        return min(self.max_backoff_s, self.backoff_s * (1 << doublings))


def import_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which a child finds this package; empty where it is installed."""
    root = Path(__file__).resolve().parents[1]
    if root.name in ("site-packages", "dist-packages"):
        return {}
    rest = environment.get("PYTHONPATH")
    return {"PYTHONPATH": f"{root}{os.pathsep}{rest}" if rest else str(root)}


def describe_exit(code: int) -> str:
    """Return an exit code in words."""
    if code >= 0:
        return f"with exit code {code}"
    hint = ", perhaps because memory ran out" if -code == signal.SIGKILL else ""
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = str(-code)
    return f"by signal {name}{hint}"
