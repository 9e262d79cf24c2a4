"""Matchers whose work is done in processes, beside a GPU whose steps take a millisecond.

The thread that launches such steps holds the GIL for most of their time, and threads that sleep take long to
wake up. So each process has its own GIL and a part of the slots, and polls the board for the next tokens; it
sleeps only when none have come for a while. The worker posts the tokens of a step when it reads them, or when
it needs the masks of the next step.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

import msgspec
import numpy as np
from numpy.typing import NDArray

from segue.children import describe_exit, import_path
from segue.guided import board as boards
from segue.guided.board import RING, Board
from segue.guided.follower import NO_VOCABULARY, Mask
from segue.guided.matchers import Matchers
from segue.logs import logger
from segue.messages.guided import GuidedVocabulary
from segue.messages.requests import SamplingParams

MOST, _CORES_EACH = 4, 4  # processes; the cores that the machine must have for each
_SPIN_S = 2e-3  # a wait that takes longer sleeps, and then wakes up late
_PAUSE_S = 50e-6  # between two looks from then on
_CHECK_S = 0.5  # between two looks whether the processes still run
_END_S = 5.0  # for a process to end by itself
_NO_GUIDE, _LOST = 0, -1  # numbers of guides: the slot has none; it has one that no process knows


def count_for(device_type: str, cores: int) -> int:
    """Return how many processes are of use beside a device; 0: a thread does the work."""
    # On a CPU the steps have the cores. About the machine see `board`.
    has_use = device_type != "cpu" and platform.machine() == "x86_64"
    return min(MOST, cores // _CORES_EACH) if has_use else 0


class _EndedError(Exception):
    """A process has ended."""


class _Taken:
    """A step, until its tokens are consumed."""

    def __init__(
        self,
        number: int,
        rows: NDArray[np.int64],
        slots: NDArray[np.int64],
        guides: NDArray[np.int64],
        read: Callable[[], Sequence[int]],
        consumed: Callable[[_Taken], list[int]],
    ) -> None:
        self.number, self.rows, self.slots, self.guides = number, rows, slots, guides
        self.read, self._consumed, self.launched_at = read, consumed, time.perf_counter()

    def result(self) -> list[int]:
        """See `CompleteRows.result`."""
        return self._consumed(self)


class ProcessMatchers(Matchers):
    """See `Matchers`; any thread may wait. The processes start when the vocabulary comes."""

    def __init__(self, masks: Mask, descriptor: int, count: int) -> None:
        """Take the masks, and how many processes to start.

        The descriptor is that of the memory that begins with the masks; it stays the caller's.
        """
        super().__init__(masks)
        self._descriptor, self._count, size = descriptor, count, len(masks)
        self._numbers = np.full(size, _NO_GUIDE)  # by slot: of its guide
        self._messages = np.zeros(size, dtype=np.int64)  # by slot: the message by which its guide began
        self._steps = np.zeros(size, dtype=np.int64)  # by slot: the last step that was taken
        self._last_guide = self._last_step = self._timed = 0
        self._pending = deque[_Taken]()  # not posted yet
        self._posted_at = 0.0
        self._lock = threading.RLock()
        self._board: Board | None = None  # None: there are no processes
        self._lost = NO_VOCABULARY  # why there are none
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []

    def set_vocabulary(self, vocabulary: GuidedVocabulary) -> None:
        """See `Matchers.set_vocabulary`."""
        if self._processes:
            return
        size, words = self._masks.shape
        descriptor, tokens = boards.create(self._count, size), os.memfd_create("segue-vocabulary")
        self._board = Board(descriptor, self._count, size)
        os.write(tokens, msgspec.msgpack.encode(vocabulary))
        for index in range(self._count):
            ours, theirs = socket.socketpair()
            numbers = [theirs.fileno(), self._descriptor, descriptor, tokens, index, self._count, size, words]
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", "segue.guided.process", *map(str, numbers)],
                    env={**os.environ, **import_path(os.environ)},
                    stdin=subprocess.DEVNULL,
                    pass_fds=numbers[:4],
                )
            )
            theirs.close()
            self._connections.append(Connection(ours.detach()))
        os.close(descriptor)
        os.close(tokens)
        logger.info("guided output: %d processes follow the grammars", self._count)

    def put(self, slot: int, params: SamplingParams, outputs: Sequence[int]) -> None:
        """See `Matchers.put`."""
        self.forget([slot])
        if (spec := params.grammar) is None:
            return
        self._last_guide += 1
        begin = (slot, self._last_guide, spec.kind, spec.text, params.late_eos, list(outputs))
        if (message := self._send(slot % self._count, begin)) is None:
            self._numbers[slot] = _LOST
            self._masks[slot] = -1
            return
        self._numbers[slot], self._steps[slot], self._messages[slot] = self._last_guide, 0, message

    def forget(self, slots: Sequence[int]) -> None:
        """See `Matchers.forget`."""
        for slot in slots:
            if (number := int(self._numbers[slot])) > 0:
                self._send(slot % self._count, (slot, number))
            self._numbers[slot] = _NO_GUIDE

    def wait(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], dict[int, str]] | None:
        """See `Matchers.wait`."""
        rows = self._numbers[slots].nonzero()[0]
        if not len(rows):
            return None
        began = time.perf_counter()
        guided, failures = slots[rows], dict[int, str]()
        try:
            if (board := self._board) is not None:
                step = int(self._steps[guided].max())
                self._post(step)
                self._await(board.done, step)
                self._await_beginnings(guided)
                self._note_times(step)
                for row in rows[board.failed[guided] == self._numbers[guided]].tolist():
                    failures[row] = board.reason(slots[row])
        except _EndedError:
            self._give_up()
        failures |= {row: self._lost for row in rows[self._numbers[guided] == _LOST].tolist()}
        self._waited_at = time.perf_counter()
        self._times["wait"].append(self._waited_at - began)
        return rows, failures

    def take(self, slots: NDArray[np.int64], read: Callable[[], Sequence[int]]) -> _Taken | None:
        """See `Matchers.take`."""
        numbers = self._numbers[slots]
        rows = numbers.nonzero()[0]
        if not len(rows):
            return None
        self._times["launch"].append(time.perf_counter() - self._waited_at)
        with self._lock:
            self._last_step += 1
            guided = slots[rows]
            taken = _Taken(self._last_step, rows, guided, numbers[rows], read, self._consumed)
            self._steps[guided] = taken.number
            self._pending.append(taken)
        return taken

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            process.kill()
            process.wait()
        self._connections, self._board = [], None

    def _consumed(self, taken: _Taken) -> list[int]:
        """Post the tokens of a step, unless that is done; returns its rows whose grammars are complete."""
        try:
            self._post(taken.number)
            if (board := self._board) is None:
                return []
            self._await(board.consumed, taken.number)
        except _EndedError:
            self._give_up()
            return []
        assert taken.number > self._last_step - RING, "the line of the step is in use for another one"
        complete = board.complete[taken.number % RING, : len(taken.rows)]
        ended: list[int] = taken.rows[complete != 0].tolist()
        return ended

    def _post(self, number: int) -> None:
        """Tell the processes the tokens of the steps up to this one."""
        with self._lock:
            while self._pending and self._pending[0].number <= number:
                taken = self._pending[0]
                tokens = taken.read()
                if (board := self._board) is not None:
                    self._await(board.consumed, taken.number - RING)
                    line, count = taken.number % RING, len(taken.rows)
                    board.slots[line, :count], board.guides[line, :count] = taken.slots, taken.guides
                    board.tokens[line, :count] = np.asarray(tokens, dtype=np.int64)[taken.rows]
                    board.complete[line, :count] = 0
                    board.counts[line] = count
                    self._posted_at = time.perf_counter()
                    self._times["tokens"].append(self._posted_at - taken.launched_at)
                    board.posted[0] = taken.number
                self._pending.popleft()
                if board is not None:
                    for index in board.asleep[:, 0].nonzero()[0].tolist():
                        self._send(index, ())  # wakes it

    def _send(self, index: int, message: tuple[object, ...]) -> int | None:
        """Send a message to a process; returns its number, or None if there are no processes."""
        with self._lock:
            if (board := self._board) is None:
                return None
            number = int(board.sent[index, 0]) + 1
            board.sent[index, 0] = number  # first: a long message fits into the socket only as it is read
            try:
                self._connections[index].send_bytes(msgspec.msgpack.encode(message))
            except OSError:
                self._give_up()
                return None
        return number

    def _await(self, counters: NDArray[np.int64], least: int) -> None:
        """Wait until each process has counted so far."""
        self._wait_until(lambda: bool((counters[:, 0] >= least).all()))

    def _await_beginnings(self, slots: NDArray[np.int64]) -> None:
        """Wait until the guides of these slots are at the places where their requests begin."""
        board = self._board
        assert board is not None
        if (board.heard[:, 0] < board.sent[:, 0]).any():
            least = np.zeros(self._count, dtype=np.int64)
            np.maximum.at(least, slots % self._count, self._messages[slots])
            self._wait_until(lambda: bool((board.heard[:, 0] >= least).all()))

    def _wait_until(self, holds: Callable[[], bool]) -> None:
        began = checked = time.perf_counter()
        while not holds():
            now = time.perf_counter()
            os.sched_yield()  # where cores are scarce
            if now - began > _SPIN_S:
                time.sleep(_PAUSE_S)
            if now - checked > _CHECK_S:
                checked = now
                if any(process.poll() is not None for process in self._processes):
                    raise _EndedError

    def _give_up(self) -> None:
        """Let all guided requests fail, because a process has ended, and with it their places."""
        with self._lock:
            if self._board is None:
                return
            codes = [code for process in self._processes if (code := process.poll()) is not None]
            self.close()
            self._pending.clear()
            self._numbers[self._numbers > 0] = _LOST
            how = describe_exit(codes[0]) if codes else "early"
            self._lost = f"a process that follows grammars has ended {how}"
        logger.error(
            "%s: guided requests fail from now on, and no others. Start the engine again; the log above may "
            "have the reason",
            self._lost,
        )

    def _note_times(self, step: int) -> None:
        """Note how long the processes took for a step, unless that is done, or a later one is under way."""
        assert self._board is not None
        if self._timed < step == self._board.posted[0]:
            self._timed = step
            consumed, computed = self._board.stamps[:, 0].max(), self._board.stamps[:, 1].max()
            self._times["consume"].append(float(consumed - self._posted_at))
            self._times["masks"].append(float(computed - consumed))
