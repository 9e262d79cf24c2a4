"""Real engines whose steps a test can hold: then no request can end before the test has interrupted it.

``python -m tests.support.held_steps`` is ``segue`` with such workers, `HELD_WORKER` is the command of one,
`StepGate.of_all` has the variables of a supervisor whose engines have them, and `hold_here` is for engines
whose scheduler runs in this process. A scheduler that is held plans no further
step; it takes messages as ever. A file says whether it is held: `StepGate` writes and removes it, and workers
find its path in the environment variable ``HELD_STEPS``.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

NAME = "HELD_STEPS"
HELD_WORKER = (sys.executable, "-P", "-c", "from tests.support.held_steps import work; work()")
SITE = Path(__file__).with_name("held_site")
LOOK_AGAIN_MS = 2


class StepGate:
    """Lets a number of steps pass, and then none before :meth:`open`."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._numbers = itertools.count()

    @property
    def environment(self) -> dict[str, str]:
        """The variables of the engine's process."""
        return {NAME: str(self._file)}

    @property
    def of_all(self) -> dict[str, str]:
        """The variables of a process that starts the engines, whose workers each count their own steps."""
        path = os.pathsep.join([str(SITE), os.environ["PYTHONPATH"]])
        return self.environment | {"PYTHONPATH": path}

    def close_after(self, steps: int) -> None:
        """Let so many steps pass, counted from now on."""
        self._write(f"steps {steps}")

    def close_at(self, tokens: int) -> None:
        """Let no further step pass once the engine has generated so many tokens since its start."""
        self._write(f"tokens {tokens}")

    def _write(self, what: str) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(f"{next(self._numbers)} {what}")
        new.replace(self._file)

    def open(self) -> None:
        self._file.unlink(missing_ok=True)


class _Guard:
    """The worker's side of a gate."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._text = ""
        self._num_left = 0

    def is_closed(self, num_tokens: int) -> bool:
        """Whether no step may pass, after so many tokens."""
        try:
            text = self._file.read_text()
        except FileNotFoundError:
            text = ""
        if text != self._text:
            self._text, self._num_left = text, int(text.split()[2]) if text else 0
        return text != "" and self._num_left <= (num_tokens if " tokens " in text else 0)

    def pass_one(self) -> None:
        if " steps " in self._text:
            self._num_left -= 1


def _hold(file: Path, replace: Callable[[type, str, Any], None]) -> None:
    """Replace what plans a step by what first looks at the gate."""
    from segue.scheduler.scheduler import Scheduler
    from segue.worker.loop import SchedulerLoop

    guard = _Guard(file)
    plan_step, receive = Scheduler.plan, SchedulerLoop._receive
    held: set[int] = set()  # schedulers whose last plan was held back: their loops look again

    def plan(self: Scheduler, now: float) -> Any:
        if guard.is_closed(self.totals.output_tokens):
            held.add(id(self))
            return None
        held.discard(id(self))
        found = plan_step(self, now)
        if found is not None:
            guard.pass_one()
        return found

    def look_again(self: SchedulerLoop, *, block: bool) -> None:
        if block and id(self.scheduler) in held:  # the gate may be open by now, and no message would follow
            self._poller.poll(LOOK_AGAIN_MS)
            block = False
        receive(self, block=block)

    replace(Scheduler, "plan", plan)
    replace(SchedulerLoop, "_receive", look_again)


def hold_this_process() -> None:
    """Hold all steps of this process while the gate is closed."""
    _hold(Path(os.environ[NAME]), setattr)


def work() -> None:
    """Be a worker process whose steps are held while the gate is closed."""
    gc.disable()  # as the real worker does, until it has imported all
    from segue.worker.entry import main

    hold_this_process()
    main()


def hold_here(file: Path, patch: pytest.MonkeyPatch) -> StepGate:
    """Returns the gate of all schedulers of this process, until the patch is undone."""
    _hold(file, patch.setattr)
    return StepGate(file)


def main() -> None:
    """Be `segue`, with workers that can be held."""
    from segue.launch import processes

    processes.WORKER_COMMAND = HELD_WORKER  # before the modules that take it for their default
    from segue.cli.entry import main as segue

    segue()


if __name__ == "__main__":
    main()
