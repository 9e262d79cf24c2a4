"""How a command line ends that cannot do what it was asked."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from segue.errors import SegueError


@contextmanager
def errors_in_red() -> Iterator[None]:
    """End the process with exit code 1 and one red line if the block raises a SegueError."""
    try:
        yield
    except SegueError as error:
        Console(stderr=True, highlight=False).print(
            f"segue: {error.message}", style="red", markup=False, soft_wrap=True
        )
        sys.exit(1)
