"""Broadcasts received over gloo, into host memory."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from segue.errors import WeightSyncError
from segue.weight_update.transport.base import (
    ReceiveObserver,
    ReceiveSpec,
    Sink,
    allocate_buffers,
    broadcast_options,
    hand_over,
)
from segue.weight_update.transport.group import FOREVER, JoinedGroup

# gloo does not tell when less came than was asked for, and ends the process when more did. So it is asked for
# more, and where what is due ends is marked: a trainer that sends 8 bytes less, or more, is found out.
_SLACK = 64 << 20  # bytes that nothing touches as long as the trainer keeps to its manifest
_SLACK_PINNED = 4 << 20
_MARK = torch.tensor([0xC3, 0x5A, 0x91, 0x0E, 0x7D, 0xB6, 0x28, 0xF4], dtype=torch.uint8)


class GlooReceive:
    """gloo: the next broadcast is on its way while the last one is taken."""

    def __init__(
        self,
        group: JoinedGroup,
        broadcasts: list[ReceiveSpec],
        sink: Sink | None,
        longest: timedelta = FOREVER,
    ) -> None:
        """``sink``: None drops what comes; ``longest``: that gloo waits for a broadcast once it is posted."""
        self._group, self._broadcasts, self._sink = group, broadcasts, sink
        self._longest = longest
        device = group.engine_device
        pinned = device.type == "cuda"
        self._stream = group.streams[1] if pinned else None
        slack = _SLACK_PINNED if pinned else _SLACK
        self._landing, self._scratch = allocate_buffers(broadcasts, group.device, slack, pinned)
        # gloo broadcasts down a tree; a rank with others below it sends them as much as it asked for itself.
        rank, size = group.rank, group.group.world_size
        self._is_leaf = rank + (1 << rank.bit_length()) >= size
        self._under_way: deque[tuple[ReceiveSpec, Tensor, dist.Work]] = deque()
        self._is_waiting = False  # and will look whether the session is over before it does anything

    def receive(self, session: ReceiveObserver) -> None:
        """Receive all; raises what the group or the sink raises."""
        process_group = self._group.process_group
        with self._stream or nullcontext():
            for index, broadcast in enumerate(self._broadcasts):
                if len(self._under_way) == len(self._landing):
                    self._settle(session)
                session.check()
                receive_buffer = self._landing[index % 2]
                target = receive_buffer if self._is_leaf else receive_buffer[: broadcast.num_bytes]
                _mark(receive_buffer, broadcast.num_bytes)
                work = process_group.broadcast([target], broadcast_options(self._longest))
                self._under_way.append((broadcast, receive_buffer, work))
                if index == 0:
                    session.entered()
            while self._under_way:
                self._settle(session)

    def drain(self) -> None:
        """Return when no memory is touched any more."""
        for _, _, work in self._under_way:
            with suppress(Exception):
                work.wait()

    def abandon(self) -> bool:
        """Of a session that is over and a group that is broken: whether its thread touches no memory now.

        A receive whose trainer died in the middle of a message waits for gloo's own timeout: gloo tells those
        that wait for a message to begin, not the one whose message has. It has no memory any more.
        """
        if self._is_waiting:
            for buffer in self._landing:
                with suppress(RuntimeError):
                    buffer.untyped_storage().resize_(0)
        return self._is_waiting

    def _settle(self, session: ReceiveObserver) -> None:
        broadcast, receive_buffer, work = self._under_way[0]
        self._is_waiting = True
        work.wait()
        self._under_way.popleft()
        self._is_waiting = False
        session.check()
        _check_marks(receive_buffer, broadcast)
        session.landed(broadcast)
        if self._sink is not None:
            hand_over(broadcast, receive_buffer, self._scratch, self._sink)
        if self._stream is not None:
            self._stream.synchronize()
        session.taken(broadcast)


def _mark(receive_buffer: Tensor, num_bytes: int) -> None:
    receive_buffer[num_bytes : num_bytes + len(_MARK)] = _MARK
    if num_bytes >= len(_MARK):
        receive_buffer[num_bytes - len(_MARK) : num_bytes] = _MARK


def _check_marks(receive_buffer: Tensor, broadcast: ReceiveSpec) -> None:
    end, size = broadcast.num_bytes, len(_MARK)
    less = end >= size and receive_buffer[end - size : end].equal(_MARK)
    if less or not receive_buffer[end : end + size].equal(_MARK):
        names = [piece.name for piece in broadcast.pieces]
        words = (
            f"{names[0]!r} .. {names[-1]!r}" if len(names) > 1 else f"{names[0]!r}" if names else "nothing"
        )
        raise WeightSyncError(
            f"the trainer broadcast {'less' if less else 'more'} than the {end} bytes that its manifest says "
            f"({words}): both must have the same tensors in the same order"
        )
