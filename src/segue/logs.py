"""The logger of all of Segue, named ``segue``. It writes to standard error."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("segue")


def configure(level: str, *, rank: int | None = None) -> None:
    """Set up this process's logging, in place of what an earlier call set up.

    ``level``: as ``--log-level`` has it, in lower case. With ``rank``, every line names that worker's rank.
    Lines do not reach the root logger, which would write them twice in a program that has its own logging.
    """
    label = "" if rank is None else f" rank {rank}"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s %(levelname)s segue{label}: %(message)s", "%H:%M:%S")
    )
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
