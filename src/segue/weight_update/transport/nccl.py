"""Broadcasts received over NCCL, into the memory of a CUDA device."""

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
    as_tensor,
    broadcast_options,
    hand_over,
    piece_bytes,
    receive_buffer_size,
)
from segue.weight_update.transport.group import JoinedGroup

# Broadcasts queued on the CUDA stream before the first of them has landed: enough that small tensors do not
# wait for us to notice, too few to fill the device's queue of launches.
_AHEAD = 32
_POLL_S = (0.00005, 0.005)  # from, to: the longer nothing has come, the rarer we look


class NcclReceive:
    """NCCL: one stream receives, one copies; the host looks at events and waits for nothing it cannot leave.

    Everything on the device is taken before the first receive. A trainer that says so announces each bucket
    (see `JoinedGroup.is_announced`): then no receive is queued before, which would keep processors of the
    device from the steps for as long as it waits.
    """

    def __init__(
        self,
        group: JoinedGroup,
        broadcasts: list[ReceiveSpec],
        sink: Sink | None,
        *,
        registered: bool = False,
    ) -> None:
        """``sink``: None drops what comes; ``registered``: the trainer sends all from registered buffers."""
        self._group, self._broadcasts = group, broadcasts
        device = group.device
        # From the default stream's pool of memory, whichever streams torch gives: the next session finds it.
        default = torch.cuda.default_stream(device)
        self._registered = group.receive_buffer(receive_buffer_size(broadcasts)) if registered else None
        kept = None if self._registered is None else self._registered.buffers
        receive_buffer, scratch = allocate_buffers(broadcasts, device, kept=kept)
        turns = cycle((0, 1))
        self._turns = [None if broadcast.direct is not None else next(turns) for broadcast in broadcasts]
        self._targets = [
            _target(broadcast, receive_buffer[turn or 0])
            for broadcast, turn in zip(broadcasts, self._turns, strict=True)
        ]
        self._takes = [
            _prepared(broadcast, target, scratch, sink)
            for broadcast, target in zip(broadcasts, self._targets, strict=True)
        ]
        self._wire, self._copies = group.streams
        self._wire.wait_stream(default)
        self._copies.wait_stream(default)
        self._landed = [self._wire.record_event() for _ in range(_AHEAD)]
        self._copied = [self._copies.record_event() for _ in range(_AHEAD)]
        self._under_way: deque[tuple[ReceiveSpec, torch.Event]] = deque()
        # The thread waits for the trainer, and will look whether the session is over before all else.
        self._is_asking = False

    def receive(self, session: ReceiveObserver) -> None:
        """Receive all; raises what the group or the sink raises."""
        process_group = self._group.process_group
        last: list[torch.Event | None] = [None, None]  # copies out of each receive buffer
        # Said before: a trainer may build its communicator no sooner than it broadcasts.
        session.entered()
        session.check()
        self._is_asking = True
        self._group.connect()
        if self._registered is not None:
            self._group.register(self._registered)
        for index, broadcast in enumerate(self._broadcasts):
            self._settle_until(session, partial(self._may_queue, broadcast))
            landed, copied = self._landed[index % _AHEAD], self._copied[index % _AHEAD]
            turn = self._turns[index]
            if turn is not None:
                before, last[turn] = last[turn], copied
                if before is not None:
                    self._wire.wait_event(before)
            with self._wire:
                process_group.broadcast([self._targets[index]], broadcast_options())
                landed.record(self._wire)
            with self._copies:
                self._copies.wait_event(landed)
                self._takes[index]()
                copied.record(self._copies)
            self._under_way.append((broadcast, copied))
        self._settle_until(session, lambda: not self._under_way)

    def drain(self) -> None:
        """Return when no memory is touched any more: kernels of an aborted communicator end too."""
        with suppress(Exception):
            while not (self._wire.query() and self._copies.query()):
                time.sleep(_POLL_S[1])

    def abandon(self) -> bool:
        """Of a session that is over and a group that is broken: whether its thread touches no memory now.

        What is queued on the device writes until it has ended; but the trainer may never answer.
        """
        if not (self._is_asking and self._wire.query() and self._copies.query()):
            return False
        self._takes.clear()
        self._targets.clear()
        self._registered = None
        for broadcast in self._broadcasts:
            broadcast.direct = None
        return True

    def _may_queue(self, broadcast: ReceiveSpec) -> bool:
        if len(self._under_way) == _AHEAD:
            return False
        self._is_asking = True
        return self._group.is_announced(broadcast.bucket)

    def _settle_until(self, session: ReceiveObserver, condition: Callable[[], bool]) -> None:
        """Count what has been copied, until something holds."""
        pause_s, longest_s = _POLL_S
        session.check()
        while not condition():
            if self._under_way and self._under_way[0][1].query():
                broadcast, _ = self._under_way.popleft()
                session.landed(broadcast)
                session.taken(broadcast)
                pause_s = _POLL_S[0]
            else:
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, longest_s)
            session.check()
        self._is_asking = False
        session.check()


def _target(broadcast: ReceiveSpec, receive_buffer: Tensor) -> Tensor:
    # Bytes, whatever the dtype: a broadcast moves bytes, and no backend knows every dtype.
    if broadcast.direct is not None:
        return broadcast.direct.reshape(-1).view(torch.uint8)
    return receive_buffer[: broadcast.num_bytes]


def _prepared(
    broadcast: ReceiveSpec, received: Tensor, scratch: Tensor, sink: Sink | None
) -> Callable[[], None]:
    """What hands over a broadcast that has landed."""
    if sink is None:
        return lambda: None
    if len(broadcast.pieces) == 1 or any(piece.is_odd for piece in broadcast.pieces):
        return partial(hand_over, broadcast, received, scratch, sink)
    return sink.prepare(
        [
            (piece.name, as_tensor(piece_bytes(broadcast, piece, received), piece))
            for piece in broadcast.pieces
        ]
    )
