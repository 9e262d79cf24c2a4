"""Answers many prompts, several at a time, and writes each answer as soon as it is there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from segue.cli.backends import Answered, TextQuery
from segue.cli.prompt_file import PromptLine
from segue.cli.remote import ServerUnavailableError
from segue.cli.result_file import PromptOutcome
from segue.errors import EngineDeadError, SegueError

FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 5.0  # before a server that is not available is asked again
POLL_S = 0.1  # between two looks of the main thread for a signal


class RunStoppedError(SegueError):
    """A run cannot go on; the answers that it has made stay."""


class Completer(Protocol):
    """Answers one prompt; any number of threads ask."""

    def complete(self, ask: TextQuery) -> Answered: ...


@dataclass(slots=True)
class Totals:
    """What a run has done so far."""

    num_answers: int = 0
    num_errors: int = 0
    num_tokens: int = 0  # of answers


class BatchRun:
    """Answers prompts by threads, each of which waits for one answer.

    An error of one prompt is its outcome. The run ends by an error that concerns all prompts: the engine has
    died, or a server could not be reached, or had no room, for ``patience_s`` seconds.
    """

    def __init__(self, model: Completer, *, parallel: int, patience_s: float) -> None:
        self._model = model
        self._parallel = parallel
        self._patience_s = patience_s
        self._asked: SimpleQueue[PromptLine | None] = SimpleQueue()
        self._found: SimpleQueue[PromptOutcome | Exception] = SimpleQueue()
        self._stopped = threading.Event()
        self.totals = Totals()

    def outcomes(self, prompts: Iterator[PromptLine], on_wait: Callable[[], None]) -> Iterator[PromptOutcome]:
        """Yield what becomes of each prompt, in the order of the answers; at most ``parallel`` are asked.

        ``on_wait`` is called every POLL_S seconds without an answer.

        Raises:
            SegueError: the run cannot go on.
        """
        # Daemons: nothing waits for an answer after Ctrl-C, and the end of the process ends the request.
        for number in range(self._parallel):
            threading.Thread(target=self._work, name=f"generate-{number}", daemon=True).start()
        in_flight = 0
        try:
            while True:
                while in_flight < self._parallel and (line := next(prompts, None)) is not None:
                    if line.ask is None:
                        yield self._counted(PromptOutcome(line=line, error=line.error))
                    else:
                        self._asked.put(line)
                        in_flight += 1
                if not in_flight:
                    return
                try:
                    found = self._found.get(timeout=POLL_S)
                except Empty:
                    on_wait()
                    continue
                if isinstance(found, Exception):
                    raise found
                in_flight -= 1
                yield self._counted(found)
        finally:
            self._stopped.set()
            for _ in range(self._parallel):
                self._asked.put(None)

    def _counted(self, outcome: PromptOutcome) -> PromptOutcome:
        totals = self.totals
        if outcome.error is None:
            totals.num_answers += 1
        else:
            totals.num_errors += 1
        if outcome.answer is not None:
            totals.num_tokens += outcome.answer.completion_tokens or 0
        return outcome

    def _work(self) -> None:
        """Answer prompts until there are no more."""
        while (line := self._asked.get()) is not None and not self._stopped.is_set():
            try:
                self._found.put(self._outcome(line))
            except Exception as error:  # the main thread raises it
                self._found.put(error)
                return

    def _outcome(self, line: PromptLine) -> PromptOutcome:
        assert line.ask is not None
        began, wait_s = time.monotonic(), FIRST_WAIT_S
        while True:
            try:
                answer = self._model.complete(line.ask)
            except ServerUnavailableError:
                if time.monotonic() - began + wait_s > self._patience_s or self._stopped.wait(wait_s):
                    raise
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            except EngineDeadError:
                raise
            except SegueError as error:
                return PromptOutcome(line=line, error=error.message)
            else:
                is_whole = answer.finish_reason != "abort"
                return PromptOutcome(
                    line=line, answer=answer, error=None if is_whole else "the request was aborted"
                )
