"""One of the processes of `processes`: `python -m segue.guided.process` with eight numbers."""

from __future__ import annotations

import logging
import mmap
import os
import select
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from segue.guided.board import RING, Board
from segue.guided.follower import Follower, Guide, Mask
from segue.host import end_with_parent
from segue.messages.guided import GrammarSpec, GuidedVocabulary

AWAKE_S = 0.005  # a process polls so long after its last work: the steps of most models take no longer
_LOOK_MS = 100  # a process that sleeps looks so often


class Serving:
    """Follows the guides of the slots whose numbers, divided by `count`, have the remainder `index`."""

    def __init__(self, connection: Connection, board: Board, masks: Mask, index: int, count: int) -> None:
        self._connection, self._board, self._masks = connection, board, masks
        self._index, self._count = index, count
        self.follower = Follower(masks)
        self._guides: dict[int, tuple[int, Guide]] = {}  # by slot, with their numbers
        self._poll = select.poll()
        self._poll.register(connection.fileno(), select.POLLIN)

    def run(self) -> None:
        """Serve until the connection is closed."""
        board, index = self._board, self._index
        posted, sent, done, heard = board.posted, board.sent[index], board.done[index], board.heard[index]
        asleep = board.asleep[index]
        worked_at = time.perf_counter()
        while True:
            step = int(posted[0])  # before `sent`: what was sent before a step is heard before it
            if sent[0] > heard[0]:
                try:
                    message = self._connection.recv_bytes()
                except (EOFError, OSError):  # the worker has ended before it could send it
                    return
                self._hear(msgspec.msgpack.decode(message))
                heard[0] += 1
            elif step > done[0]:
                self._advance(int(done[0]) + 1)
            elif time.perf_counter() - worked_at < AWAKE_S:
                os.sched_yield()  # where cores are scarce
                continue
            else:
                asleep[0] = 1
                if posted[0] == step and sent[0] == heard[0]:
                    found = self._poll.poll(_LOOK_MS)
                    if found and sent[0] == heard[0]:  # nothing was sent: the worker has closed it
                        return
                asleep[0] = 0
                if posted[0] == step and sent[0] == heard[0]:
                    continue  # and sleep again at once
            worked_at = time.perf_counter()

    def _hear(self, message: list[Any]) -> None:
        """Begin a guide, or forget one; an empty message only wakes this process."""
        if len(message) == 2:
            slot, number = message
            if self._guides.get(slot, (0, None))[0] == number:
                del self._guides[slot]
        elif message:
            slot, number, kind, text, late_eos, outputs = message
            guide = Guide(slot, self._masks[slot], late_eos)
            self._guides[slot] = number, guide
            self.follower.begin(guide, GrammarSpec(kind, text), outputs)
            self._tell_failure(number, guide)

    def _advance(self, step: int) -> None:
        """Take the tokens of a step, and compute the next masks."""
        board, index, line = self._board, self._index, step % RING
        stamps, count = board.stamps[index], int(board.counts[line])
        slots, numbers = board.slots[line, :count].tolist(), board.guides[line, :count].tolist()
        guides = dict[int, tuple[int, Guide]]()
        for row, (slot, number) in enumerate(zip(slots, numbers, strict=True)):
            # A slot may have another request's guide by now.
            if slot % self._count == index and (found := self._guides.get(slot)) and found[0] == number:
                guides[row] = found
        rows = [(row, guide) for row, (_, guide) in guides.items()]
        going_on, ended = self.follower.consume(rows, board.tokens[line, :count].tolist())
        for row in ended:
            board.complete[line, row] = 1
        stamps[0] = time.perf_counter()
        board.consumed[index, 0] = step
        self.follower.fill(going_on)
        for number, guide in guides.values():
            self._tell_failure(number, guide)
        stamps[1] = time.perf_counter()
        board.done[index, 0] = step

    def _tell_failure(self, number: int, guide: Guide) -> None:
        if guide.failure and self._board.failed[guide.slot] != number:
            self._board.fail(guide.slot, number, guide.failure)


def main(arguments: list[str]) -> None:
    """Serve with the numbers of `ProcessMatchers`: four descriptors, then sizes."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker decides
    logging.basicConfig(format="segue: %(message)s")
    theirs, table, of_board, tokens, index, count, size, words = map(int, arguments)
    connection, board = Connection(theirs), Board(of_board, count, size)
    shared = mmap.mmap(table, os.fstat(table).st_size, flags=mmap.MAP_SHARED)
    masks = np.frombuffer(shared, dtype=np.int32, count=size * words).reshape(size, words)
    serving = Serving(connection, board, masks, index, count)
    with mmap.mmap(tokens, 0, prot=mmap.PROT_READ) as encoded:
        serving.follower.prepare(msgspec.msgpack.decode(encoded, type=GuidedVocabulary))
    board.ready[index] = 1
    serving.run()


if __name__ == "__main__":
    main(sys.argv[1:])
