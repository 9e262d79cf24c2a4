"""What a person sees on a terminal while a model is loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from segue.logs import LogFormat

if TYPE_CHECKING:
    from segue.messages.control import StartStep


@contextmanager
def start_view(log_format: LogFormat) -> Iterator[Callable[[StartStep | None], None] | None]:
    """Return what shows the steps of a start; None where standard error is no terminal, or for JSON.

    The line is removed when the last step has ended, or the block does.
    """
    if log_format == "json" or not sys.stderr.isatty():
        yield None
        return
    view = StartView()
    try:
        yield view.show
    finally:
        view.close()


class StartView:
    """One line: the step, its number and seconds, and the bytes of weights or the kernels that are there."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("start {task.description}"), TimeElapsedColumn())
        loading = (*columns, BarColumn(), DownloadColumn(binary_units=True))
        console = Console(stderr=True, highlight=False)
        self._plain = Progress(*columns, console=console, transient=True)
        self._loading = Progress(*loading, console=console, transient=True)
        self._shown: Progress | None = None
        self._number = 0

    def show(self, step: StartStep | None) -> None:
        """Show a step that begins, or its bytes; None: the last one has ended."""
        if step is None:
            self.close()
            return
        wanted = self._loading if step.total_bytes else self._plain
        text = f"{step.number}/{step.num_steps}: {step.step}{step.detail and ', '}{step.detail}"
        if wanted is not self._shown or step.number != self._number:
            self.close()
            for task in wanted.task_ids:
                wanted.remove_task(task)
            wanted.add_task(text, total=step.total_bytes or None)
            wanted.start()
            self._shown, self._number = wanted, step.number
        wanted.update(wanted.task_ids[0], description=text, completed=step.num_bytes)

    def close(self) -> None:
        """Remove the line."""
        if self._shown is not None:
            self._shown.stop()
            self._shown = None
