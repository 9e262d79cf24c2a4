"""Receives broadcasts over NCCL, into the memory of a CUDA device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from segue.weight_update.transport.base import (
    ReceiveObserver,
    ReceiveSpec,
    Sink,
    allocate_buffers,
    broadcast_options,
    hand_over,
    receive_buffer_size,
    views,
)
from segue.weight_update.transport.group import JoinedGroup
from segue.weight_update.transport.pace import ReceivePace

# Broadcasts that may be in flight on the CUDA stream: enough that small tensors do not wait for this thread's
# polling, too few to fill the device's launch queue.
_AHEAD = 32
_POLL_S = (0.00005, 0.005)  # shortest and longest pause between polls; it grows while nothing is received


class NcclReceive:
    """Receives over NCCL on one stream and copies on another; the host polls events, so that it can stop.

    All device memory is allocated before the first receive. If the trainer announces its buckets (see
    `JoinedGroup.is_announced`), no receive is queued before its bucket is announced: a waiting NCCL kernel
    would keep SMs of the device from the steps. For the same reason ``pace`` limits what is queued.
    """

    def __init__(
        self,
        group: JoinedGroup,
        broadcasts: list[ReceiveSpec],
        sink: Sink | None,
        *,
        registered: bool = False,
        pace: ReceivePace | None = None,
    ) -> None:
        """``sink``: None drops all tensors; ``registered``: receive into buffers registered with NCCL."""
        self._group, self._broadcasts = group, broadcasts
        self._pace = pace or ReceivePace()
        device = group.device
        # Allocated from the default stream's memory pool, where the next session finds the memory again.
        default = torch.cuda.default_stream(device)
        self._registered = group.registered_buffers(receive_buffer_size(broadcasts)) if registered else None
        kept = None if self._registered is None else self._registered.buffers
        receive_buffers, scratch = allocate_buffers(broadcasts, device, kept=kept)
        # The next three lists have an item per broadcast: the index of its receive buffer (None: it is
        # received directly), the memory to receive into, and the function that stores it.
        indices = cycle((0, 1))
        self._buffer_indices = [
            None if broadcast.direct is not None else next(indices) for broadcast in broadcasts
        ]
        self._targets = [
            _target(broadcast, receive_buffers[index or 0])
            for broadcast, index in zip(broadcasts, self._buffer_indices, strict=True)
        ]
        self._stores = [
            _prepare_store(broadcast, target, scratch, sink)
            for broadcast, target in zip(broadcasts, self._targets, strict=True)
        ]
        self._receive_stream, self._copy_stream = group.streams
        self._receive_stream.wait_stream(default)
        self._copy_stream.wait_stream(default)
        # Broadcast number i uses events i % _AHEAD: no more are in flight, so that the events can be reused.
        self._received_events = [self._receive_stream.record_event() for _ in range(_AHEAD)]
        self._copied_events = [self._copy_stream.record_event() for _ in range(_AHEAD)]
        self._in_flight: deque[tuple[ReceiveSpec, torch.Event]] = deque()
        # While True, the thread waits for the trainer, and checks the session before anything else.
        self._is_waiting = False

    def receive(self, session: ReceiveObserver) -> None:
        """Receive and store all broadcasts; raises the errors of the group and of the sink.

        This thread only queues device work. A broadcast waits for the copies out of its buffer before it, and
        its own copies, on the other stream, wait for the broadcast.
        """
        process_group = self._group.process_group
        last: list[torch.Event | None] = [None, None]  # end of the last copies out of each receive buffer
        # Reported first: a trainer may build its communicator only with its first broadcast.
        session.ready()
        session.check()
        self._is_waiting = True
        self._group.connect()
        if self._registered is not None:
            self._group.register(self._registered)
        for index, broadcast in enumerate(self._broadcasts):
            self._poll_until(session, partial(self._can_queue, broadcast))
            received, copied = self._received_events[index % _AHEAD], self._copied_events[index % _AHEAD]
            buffer = self._buffer_indices[index]
            if buffer is not None:  # do not overwrite the buffer before its last tensors were copied out
                before, last[buffer] = last[buffer], copied
                if before is not None:
                    self._receive_stream.wait_event(before)
            with self._receive_stream:
                process_group.broadcast([self._targets[index]], broadcast_options())
                received.record(self._receive_stream)
            with self._copy_stream:
                self._copy_stream.wait_event(received)
                self._stores[index]()
                copied.record(self._copy_stream)
            self._in_flight.append((broadcast, copied))
            self._pace.posted(broadcast.num_bytes)
        self._poll_until(session, lambda: not self._in_flight)

    def wait_idle(self) -> None:
        """Wait until the device touches no memory any more; kernels of an aborted communicator end too."""
        with suppress(Exception):
            while not (self._receive_stream.query() and self._copy_stream.query()):
                time.sleep(_POLL_S[1])

    def try_release(self) -> bool:
        """Drop all buffers if the thread only waits for the trainer; True if nothing touches memory any more.

        To be called once the session has ended and the group is closed. Queued device work must have ended,
        since it writes to the buffers; the thread itself may wait for ever for a trainer that never answers.
        """
        if not (self._is_waiting and self._receive_stream.query() and self._copy_stream.query()):
            return False
        self._stores.clear()
        self._targets.clear()
        self._registered = None
        for broadcast in self._broadcasts:
            broadcast.direct = None
        return True

    def _can_queue(self, broadcast: ReceiveSpec) -> bool:
        """Whether the next broadcast may be queued.

        Few enough are in flight, the pace allows it, and its bucket is announced.
        """
        if len(self._in_flight) == _AHEAD or not self._pace.may_post(broadcast.num_bytes):
            return False
        self._is_waiting = True
        return self._group.is_announced(broadcast.bucket)

    def _poll_until(self, session: ReceiveObserver, condition: Callable[[], bool]) -> None:
        """Report the broadcasts that were copied, until ``condition()`` holds or the session has ended."""
        pause_s, max_pause_s = _POLL_S
        session.check()
        while not condition():
            if self._in_flight and self._in_flight[0][1].query():
                broadcast, _ = self._in_flight.popleft()
                if not self._in_flight:
                    self._pace.drained()
                session.received(broadcast)
                session.stored(broadcast)
                pause_s = _POLL_S[0]
            else:
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, max_pause_s)
            session.check()
        self._is_waiting = False
        session.check()


def _target(broadcast: ReceiveSpec, receive_buffer: Tensor) -> Tensor:
    """Returns the memory to receive a broadcast into, as `uint8[num_bytes]`."""
    # Broadcasts move bytes whatever the dtype: no backend knows every dtype.
    if broadcast.direct is not None:
        return broadcast.direct.reshape(-1).view(torch.uint8)
    return receive_buffer[: broadcast.num_bytes]


def _prepare_store(
    broadcast: ReceiveSpec, received: Tensor, scratch: Tensor, sink: Sink | None
) -> Callable[[], None]:
    """Returns the function that stores a received broadcast, on the current stream.

    The copies of a bucket are prepared here, before it is received. A single tensor, or a bucket with a
    misaligned one, which must go through ``scratch``, is stored tensor by tensor.
    """
    if sink is None:
        return lambda: None
    if len(broadcast.pieces) == 1 or any(piece.is_misaligned for piece in broadcast.pieces):
        return partial(hand_over, broadcast, received, scratch, sink)
    return sink.prepare(list(views(broadcast, received, scratch)))
