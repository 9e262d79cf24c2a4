"""How a command line ends that cannot do what it was asked."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from segue.errors import SegueError
from segue.logs import logger, writes_json


@contextmanager
def errors_in_red() -> Iterator[None]:
    """End the process with exit code 1 and one red line if the block raises a SegueError.

    Where the log has been set up as JSON, it is a line of the log.
    """
    try:
        yield
    except SegueError as error:
        if writes_json():
            logger.critical("%s", error.message)
            sys.exit(1)
        Console(stderr=True, highlight=False).print(
            f"segue: {error.message}", style="red", markup=False, soft_wrap=True
        )
        sys.exit(1)
