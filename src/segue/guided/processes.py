"""Matchers whose work is done in processes, beside a GPU whose steps take a millisecond.

The thread that launches such steps holds the GIL for most of their time, and threads that sleep take long to
wake up. So each process has its own GIL and a part of the slots, and polls the board for the next tokens; it
sleeps only when none have come for a while. The worker posts the tokens of a step when it reads them, or when
it needs the masks of the next step.

Where a process ends, the guided requests that run fail, as their places in their grammars are lost, and all
processes are started anew. Until they are ready, which takes about a second, the scheduler admits no guided
request (`can_begin`).
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
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection

import msgspec
import numpy as np
from numpy.typing import NDArray

from segue.children import RestartRule, describe_exit, import_path
from segue.guided import board as boards
from segue.guided.board import RING, Board
from segue.guided.follower import NO_VOCABULARY, Mask
from segue.guided.matchers import Matchers
from segue.logs import logger
from segue.messages.guided import GuidedVocabulary, LostGuide
from segue.messages.requests import SamplingParams

MOST, _CORES_EACH = 4, 4  # processes; the cores that an engine must have for each
_SPIN_S = 2e-3  # a wait that takes longer sleeps, and then wakes up late
_PAUSE_S = 50e-6  # between two looks from then on
_CHECK_S = 0.5  # between two looks whether the processes still run
_RESTARTS = RestartRule()
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}  # else numpy starts one per core, which do nothing
_NO_GUIDE, _LOST = 0, -1  # numbers of guides: the slot has none; it has one that no process knows


def count_for(device_type: str, cores: int, share: int) -> int:
    """Return how many processes are of use beside a device; 0: a thread does the work.

    Args:
        device_type: on a CPU the steps have the cores.
        cores: those that the engine may use.
        share: those of them that it is to use, because other engines may use the same ones.
    """
    if device_type == "cpu" or platform.machine() != "x86_64" or cores < _CORES_EACH:  # see `board`
        return 0
    return max(1, min(MOST, cores // _CORES_EACH, share // _CORES_EACH))


class _EndedError(Exception):
    """A process has ended, and with it all guides are lost."""


class _Running:
    """The processes of one start, and the board by which they are told of steps."""

    board: Board
    is_ready = False  # whether all of them have prepared the vocabulary, as far as that was asked

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Connection] = []
        self.began = time.monotonic()

    def start(
        self, masks: int, shape: tuple[int, ...], vocabulary: bytes, count: int, last_step: int
    ) -> None:
        """Start so many processes, which take the steps behind the last one; `masks` is a descriptor.

        Raises:
            OSError: the system gives no process, descriptor or memory. Call `end` then, too.
        """
        size, words = shape
        with ExitStack() as passed:
            passed.callback(os.close, of_board := boards.create(count, size))
            passed.callback(os.close, tokens := os.memfd_create("segue-vocabulary"))
            self.board = Board(of_board, count, size)
            self.board.begin_behind(last_step)
            os.write(tokens, vocabulary)
            for index in range(count):
                ours, theirs = socket.socketpair()
                self.connections.append(Connection(ours.detach()))
                numbers = [theirs.fileno(), masks, of_board, tokens, index, count, size, words]
                with theirs:
                    self.processes.append(
                        subprocess.Popen(
                            [sys.executable, "-P", "-m", "segue.guided.process", *map(str, numbers)],
                            env={**os.environ, **import_path(os.environ), **_ONE_THREAD},
                            stdin=subprocess.DEVNULL,
                            pass_fds=numbers[:4],
                        )
                    )

    def exit_codes(self) -> list[int]:
        """Return those of the processes that have ended."""
        return [code for process in self.processes if (code := process.poll()) is not None]

    def end(self) -> None:
        """Kill the processes, which have nothing to keep."""
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


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
        self._vocabulary = b""
        self._running: _Running | None = None  # None: there are no processes
        self._lost = NO_VOCABULARY  # why there are none
        self._deaths, self._next_start = 0, 0.0  # in a row, as `_RESTARTS` counts; by the monotonic clock

    def set_vocabulary(self, vocabulary: GuidedVocabulary) -> None:
        """See `Matchers.set_vocabulary`."""
        self._vocabulary = msgspec.msgpack.encode(vocabulary)
        self._start()

    def _start(self) -> None:
        """Start the processes if none run and they may; they have no part in steps that were taken before."""
        with self._lock:
            if self._running or not self._vocabulary or time.monotonic() < self._next_start:
                return
            self._post(self._last_step)
            self._messages[:] = 0
            self._running = running = _Running()
            try:
                running.start(
                    self._descriptor, self._masks.shape, self._vocabulary, self._count, self._last_step
                )
            except OSError as error:
                self._give_up(running, f"a process that follows grammars could not be started ({error})")
            else:
                logger.info("guided output: %d processes follow the grammars", self._count)

    def put(self, slot: int, params: SamplingParams, outputs: Sequence[int]) -> None:
        """See `Matchers.put`."""
        self.forget([slot])
        if (spec := params.grammar) is None:
            return
        self._start()
        self._last_guide += 1
        begin = (slot, self._last_guide, spec.kind, spec.text, params.late_eos, list(outputs))
        with self._lock:  # or another thread might give all guides up in between, and not this one
            message = self._send(slot % self._count, begin)
            self._numbers[slot] = _LOST if message is None else self._last_guide
            self._steps[slot], self._messages[slot] = 0, message or 0

    def can_begin(self) -> bool:
        """See `Matchers.can_begin`; starts the processes if none run and they may."""
        if self._running is None:
            self._start()
        if (running := self._running) is None or running.is_ready:
            return True
        if running.exit_codes():
            self._give_up(running)
            return False
        running.is_ready = bool(running.board.ready[:, 0].all())
        return running.is_ready

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
        step = int(self._steps[guided].max())
        lives = self._numbers[guided] > 0
        if (
            running := self._running
        ) is not None and lives.any():  # later processes have no part in lost ones
            with suppress(_EndedError):
                board = running.board
                self._post(step)
                self._await(running, board.done, step)
                self._await_beginnings(running, guided)
                self._note_times(board, step)
                for row in rows[board.failed[guided] == self._numbers[guided]].tolist():
                    failures[row] = board.reason(slots[row])
        lost = rows[self._numbers[guided] == _LOST]
        if len(lost):
            self._post(step)  # so that no step still reads their masks, which may be half written
            self._masks[slots[lost]] = -1
            failures |= dict.fromkeys(lost.tolist(), LostGuide(self._lost))
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
        if self._running is not None:
            self._running.end()
        self._running, self._vocabulary = None, b""

    def _consumed(self, taken: _Taken) -> list[int]:
        """Post the tokens of a step, unless that is done; returns its rows whose grammars are complete."""
        with suppress(_EndedError):
            self._post(taken.number)
            if (running := self._running) is not None and (taken.guides > 0).any():
                self._await(running, running.board.consumed, taken.number)
                assert taken.number > self._last_step - RING, "its line is in use for another step"
                complete = running.board.complete[taken.number % RING, : len(taken.rows)]
                ended: list[int] = taken.rows[complete != 0].tolist()
                return ended
        return []

    def _post(self, number: int) -> None:
        """Tell the processes the tokens of the steps up to this one."""
        with self._lock:
            while self._pending and self._pending[0].number <= number:
                taken = self._pending[0]
                tokens = taken.read()
                if (running := self._running) is not None:
                    board, line, count = running.board, taken.number % RING, len(taken.rows)
                    self._await(running, board.consumed, taken.number - RING)
                    board.slots[line, :count], board.guides[line, :count] = taken.slots, taken.guides
                    board.tokens[line, :count] = np.asarray(tokens, dtype=np.int64)[taken.rows]
                    board.complete[line, :count] = 0
                    board.counts[line] = count
                    self._posted_at = time.perf_counter()
                    self._times["tokens"].append(self._posted_at - taken.launched_at)
                    board.posted[0] = taken.number
                self._pending.popleft()
                if running is not None:
                    for index in running.board.asleep[:, 0].nonzero()[0].tolist():
                        self._send(index, ())  # wakes it

    def _send(self, index: int, message: tuple[object, ...]) -> int | None:
        """Send a message to a process; returns its number, or None if there are no processes."""
        encoded = msgspec.msgpack.encode(message)
        with self._lock:
            if (running := self._running) is None:
                return None
            number = int(running.board.sent[index, 0]) + 1
            running.board.sent[index, 0] = number  # first: a long one fits into the socket only as it is read
            try:
                running.connections[index].send_bytes(encoded)
            except OSError:
                self._give_up(running)
                return None
        return number

    def _await(self, running: _Running, counters: NDArray[np.int64], least: int) -> None:
        """Wait until each process has counted so far."""
        self._wait_until(running, lambda: bool((counters[:, 0] >= least).all()))

    def _await_beginnings(self, running: _Running, slots: NDArray[np.int64]) -> None:
        """Wait until the guides of these slots are at the places where their requests begin."""
        board = running.board
        if (board.heard[:, 0] < board.sent[:, 0]).any():
            least = np.zeros(self._count, dtype=np.int64)
            np.maximum.at(least, slots % self._count, self._messages[slots])
            self._wait_until(running, lambda: bool((board.heard[:, 0] >= least).all()))

    def _wait_until(self, running: _Running, holds: Callable[[], bool]) -> None:
        """Wait until that holds.

        Raises:
            _EndedError: a process has ended.
        """
        began = checked = time.perf_counter()
        while not holds():
            now = time.perf_counter()
            os.sched_yield()  # where cores are scarce
            if now - began > _SPIN_S:
                time.sleep(_PAUSE_S)
            if now - checked > _CHECK_S:
                checked = now
                if running.exit_codes():
                    self._give_up(running)
                    raise _EndedError

    def _give_up(self, running: _Running, why: str = "") -> None:
        """Let the guided requests that run fail, because a process has ended, and with it their places."""
        with self._lock:
            if self._running is not running:
                return  # another thread has done it
            codes, now = running.exit_codes(), time.monotonic()
            running.end()
            self._running = None
            self._numbers[self._numbers > 0] = _LOST
            self._deaths = _RESTARTS.count(self._deaths, start_s=0.0, ready_s=now - running.began)
            pause_s = _RESTARTS.pause_s(self._deaths)
            self._next_start = now + pause_s
            how = describe_exit(codes[0]) if codes else "early"
            self._lost = why or f"a process that follows grammars has ended {how}"
        logger.error(
            "%s: the guided requests that run fail, and no others. The processes are started again after "
            "%g s. The log above may have the reason",
            self._lost,
            pause_s,
        )

    def _note_times(self, board: Board, step: int) -> None:
        """Note how long the processes took for a step, unless that is done, or a later one is under way."""
        if self._timed < step == board.posted[0]:
            self._timed = step
            consumed, computed = board.stamps[:, 0].max(), board.stamps[:, 1].max()
            self._times["consume"].append(float(consumed - self._posted_at))
            self._times["masks"].append(float(computed - consumed))
