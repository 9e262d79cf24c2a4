"""Processes that tests start: they end with the tests, however these end."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

from segue.cluster.processes import die_with


def start_child(
    command: Sequence[str | os.PathLike[str]], preexec_fn: Callable[[], object] | None = None, **options: Any
) -> subprocess.Popen[Any]:
    """Start a process as `subprocess.Popen` does; the kernel kills it when this process ends.

    A run of tests that is killed by SIGKILL ends no process by itself, and engines would go on for ever.
    """
    parent = os.getpid()

    def before() -> None:
        die_with(parent)
        if preexec_fn is not None:
            preexec_fn()

    start = partial(subprocess.Popen, command, preexec_fn=before, **options)
    return _starter(parent).submit(start).result()


@cache
def _starter(pid: int) -> ThreadPoolExecutor:
    """A thread that lives as long as this process: with it the kernel kills the children it has started."""
    return ThreadPoolExecutor(1, thread_name_prefix="start-child")
