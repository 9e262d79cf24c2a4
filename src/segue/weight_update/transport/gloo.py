"""Receives broadcasts over gloo, into host memory."""

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

# gloo reports no error for a message that is shorter than the receive asked for, and ends the process for a
# longer one. So each receive asks for more bytes than the manifest says, and marks surround the expected end
# of the message: they detect a trainer that sends 8 bytes less, or more.
_SLACK = 64 << 20  # extra bytes, which stay untouched as long as the trainer keeps to its manifest
_SLACK_PINNED = 4 << 20
_MARK = torch.tensor([0xC3, 0x5A, 0x91, 0x0E, 0x7D, 0xB6, 0x28, 0xF4], dtype=torch.uint8)


class GlooReceive:
    """Receives over gloo with two buffers: one broadcast is received while the last one is stored."""

    def __init__(
        self,
        group: JoinedGroup,
        broadcasts: list[ReceiveSpec],
        sink: Sink | None,
        timeout: timedelta = FOREVER,
    ) -> None:
        """``sink``: None drops all tensors; ``timeout``: after which gloo gives up a posted receive."""
        self._group, self._broadcasts, self._sink = group, broadcasts, sink
        self._gloo_timeout = timeout
        device = group.engine_device
        pinned = device.type == "cuda"
        self._stream = group.streams[1] if pinned else None
        slack = _SLACK_PINNED if pinned else _SLACK
        self._receive_buffers, self._scratch = allocate_buffers(broadcasts, group.device, slack, pinned)
        # gloo broadcasts down a tree: an inner rank forwards as many bytes as it asked for itself.
        rank, size = group.rank, group.group.world_size
        self._is_leaf = rank + (1 << rank.bit_length()) >= size
        self._in_flight: deque[tuple[ReceiveSpec, Tensor, dist.Work]] = deque()
        self._is_waiting = False  # in gloo; then the thread checks the session before anything else

    def receive(self, session: ReceiveObserver) -> None:
        """Receive and store all broadcasts; raises the errors of the group and of the sink.

        Two receives are posted ahead, one per buffer; the oldest one is stored before its buffer is reused.
        """
        process_group = self._group.process_group
        with self._stream or nullcontext():
            for index, broadcast in enumerate(self._broadcasts):
                if len(self._in_flight) == len(self._receive_buffers):
                    self._finish_oldest(session)
                session.check()
                receive_buffer = self._receive_buffers[index % 2]
                # Only a leaf may ask for more bytes than are sent: an inner rank would forward them too.
                target = receive_buffer if self._is_leaf else receive_buffer[: broadcast.num_bytes]
                _mark(receive_buffer, broadcast.num_bytes)
                work = process_group.broadcast([target], broadcast_options(self._gloo_timeout))
                self._in_flight.append((broadcast, receive_buffer, work))
                if index == 0:
                    session.ready()
            while self._in_flight:
                self._finish_oldest(session)

    def wait_idle(self) -> None:
        """Wait until gloo writes to no buffer any more."""
        for _, _, work in self._in_flight:
            with suppress(Exception):
                work.wait()

    def try_release(self) -> bool:
        """Free the receive buffers if the thread only waits in gloo; True if it touches no memory any more.

        To be called once the session has ended and the group is closed. A receive whose trainer died in the
        middle of a message waits until gloo's own timeout: gloo only fails receives whose message has not
        begun.
        """
        if self._is_waiting:
            for buffer in self._receive_buffers:
                with suppress(RuntimeError):
                    buffer.untyped_storage().resize_(0)
        return self._is_waiting

    def _finish_oldest(self, session: ReceiveObserver) -> None:
        """Wait for the oldest posted receive, check its size by the marks, and store its tensors.

        While this thread waits in gloo, another may call `try_release`; so the session is checked before the
        buffers are touched again.
        """
        broadcast, receive_buffer, work = self._in_flight[0]
        self._is_waiting = True
        work.wait()
        self._in_flight.popleft()
        self._is_waiting = False
        session.check()
        _check_marks(receive_buffer, broadcast)
        session.received(broadcast)
        if self._sink is not None:
            hand_over(broadcast, receive_buffer, self._scratch, self._sink)
        if self._stream is not None:
            self._stream.synchronize()
        session.stored(broadcast)


def _mark(receive_buffer: Tensor, num_bytes: int) -> None:
    """Write marks before and after the end of the expected message; `_check_marks` reads them."""
    receive_buffer[num_bytes : num_bytes + len(_MARK)] = _MARK
    if num_bytes >= len(_MARK):
        receive_buffer[num_bytes - len(_MARK) : num_bytes] = _MARK


def _check_marks(receive_buffer: Tensor, broadcast: ReceiveSpec) -> None:
    """Refuse a message of another size: the mark before its end is to be overwritten, the one after not.

    Raises:
        WeightSyncError: the trainer sent less or more bytes than its manifest says.
    """
    end, size = broadcast.num_bytes, len(_MARK)
    less = end >= size and receive_buffer[end - size : end].equal(_MARK)
    if less or not receive_buffer[end : end + size].equal(_MARK):
        names = [piece.name for piece in broadcast.pieces]
        tensors = (
            f"{names[0]!r} .. {names[-1]!r}" if len(names) > 1 else f"{names[0]!r}" if names else "nothing"
        )
        raise WeightSyncError(
            f"the trainer broadcast {'less' if less else 'more'} than the {end} bytes that its manifest says "
            f"({tensors}): broadcast the tensors of the manifest, in its order"
        )
