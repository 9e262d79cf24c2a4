"""The one logger: ``segue``, to standard error."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("segue")


def configure(level: str, *, rank: int | None = None) -> None:
    """Set up the process's logging; ``rank`` names a worker in every line."""
    who = "" if rank is None else f" rank {rank}"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s segue{who}: %(message)s", "%H:%M:%S"))
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
