"""How broadcasts are received: over gloo into host memory, over NCCL into the device's."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import cycle
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from segue.errors import WeightSyncError
from segue.messages.weight_operations import Bucket, Manifest
from segue.weight_update.transport.group import FOREVER, JoinedGroup

# Broadcasts queued on the CUDA stream before the first of them has landed: enough that small tensors do not
# wait for us to notice, too few to fill the device's queue of launches.
_AHEAD = 32
_POLL_S = (0.00005, 0.005)  # from, to: the longer nothing has come, the rarer we look
# gloo does not tell when less came than was asked for, and ends the process when more did. So it is asked for
# more, and where what is due ends is marked: a trainer that sends 8 bytes less, or more, is found out.
_SLACK = 64 << 20  # bytes that nothing touches as long as the trainer keeps to its manifest
_SLACK_PINNED = 4 << 20
_MARK = torch.tensor([0xC3, 0x5A, 0x91, 0x0E, 0x7D, 0xB6, 0x28, 0xF4], dtype=torch.uint8)


class Sink(Protocol):
    """Where landed tensors go; called from the receiver's thread.

    While a receive is open nothing is allocated on CUDA: by `take`, and by what `prepare` gives.
    """

    def direct(self, name: str) -> Tensor | None:
        """A contiguous CUDA tensor of the wire's dtype and the whole shape, to receive into; or None."""

    def take(self, name: str, tensor: Tensor) -> None:
        """Keep this rank's part of a whole tensor that has landed; once for each, in order.

        ``tensor`` is that of `direct` where there was one; any other is overwritten later: by work on the
        current stream, if it is on CUDA, else when this returns.
        """

    def prepare(self, tensors: Sequence[tuple[str, Tensor]]) -> Callable[[], None]:
        """What takes all of these as `take` does, whenever they have landed there."""


@dataclass(slots=True)
class Piece:
    """A tensor in a broadcast."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    start: int  # byte
    num_bytes: int

    @property
    def is_odd(self) -> bool:
        """Whether it lies where no tensor of its dtype can."""
        return self.start % self.dtype.itemsize != 0


@dataclass(slots=True)
class ReceiveSpec:
    """What one collective brings."""

    num_bytes: int
    pieces: list[Piece]
    direct: Tensor | None  # where it lands, if not in a receive buffer
    bucket: int  # of which it is part
    num_buckets: int  # that are there when this one is


class ReceiveObserver(Protocol):
    """Whom a wire tells how far it is."""

    def check(self) -> None:
        """Raise if the session is over."""

    def entered(self) -> None:
        """The trainer may broadcast: the first receive is posted, or will be without further ado."""

    def landed(self, broadcast: ReceiveSpec) -> None:
        """A broadcast was received."""

    def taken(self, broadcast: ReceiveSpec) -> None:
        """The sink has it."""


def plan(manifest: Manifest, sink: Sink | None, device: torch.device) -> list[ReceiveSpec]:
    """The broadcasts of a manifest, in order: one a bucket, or one a tensor; empty ones are sent too."""
    broadcasts = []
    for index, bucket in enumerate(manifest.buckets):
        pieces = list(_pieces(bucket, manifest.flattened))
        if manifest.flattened:
            num_bytes = sum(piece.num_bytes for piece in pieces)
            broadcasts.append(ReceiveSpec(num_bytes, pieces, None, index, index + 1))
            continue
        for number, piece in enumerate(pieces, 1):
            direct = sink.direct(piece.name) if sink is not None and device.type == "cuda" else None
            done = index + (number == len(pieces))
            broadcasts.append(ReceiveSpec(piece.num_bytes, [piece], direct, index, done))
    return broadcasts


class HostWire:
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
        self._landing, self._scratch = _buffers(broadcasts, group.device, slack, pinned)
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
                work = process_group.broadcast([target], _options(self._longest))
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
            _hand_over(broadcast, receive_buffer, self._scratch, self._sink)
        if self._stream is not None:
            self._stream.synchronize()
        session.taken(broadcast)


class CudaWire:
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
        self._registered = group.receive_buffer(_landing_size(broadcasts)) if registered else None
        kept = None if self._registered is None else self._registered.buffers
        receive_buffer, scratch = _buffers(broadcasts, device, kept=kept)
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
                process_group.broadcast([self._targets[index]], _options())
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


def _pieces(bucket: Bucket, flattened: bool) -> Iterator[Piece]:
    start = 0
    for name, text, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        dtype = getattr(torch, text.removeprefix("torch."))
        num_bytes = math.prod(shape) * dtype.itemsize
        yield Piece(name, dtype, shape, start, num_bytes)
        start += num_bytes if flattened else 0


def _landing_size(broadcasts: list[ReceiveSpec]) -> int:
    return max((b.num_bytes for b in broadcasts if b.direct is None), default=0)


def _buffers(
    broadcasts: list[ReceiveSpec],
    device: torch.device,
    slack: int = 0,
    pinned: bool = False,
    kept: list[Tensor] | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Two receive buffers for the largest broadcast, and one for the largest tensor at an odd offset."""

    def take(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned and size > 0)

    size = _landing_size(broadcasts) + slack
    odd = max((p.num_bytes for b in broadcasts for p in b.pieces if p.is_odd), default=0)
    return kept or [take(size), take(size)], take(odd)


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


def _target(broadcast: ReceiveSpec, receive_buffer: Tensor) -> Tensor:
    # Bytes, whatever the dtype: a broadcast moves bytes, and no backend knows every dtype.
    if broadcast.direct is not None:
        return broadcast.direct.reshape(-1).view(torch.uint8)
    return receive_buffer[: broadcast.num_bytes]


def _hand_over(broadcast: ReceiveSpec, received: Tensor, scratch: Tensor, sink: Sink) -> None:
    for piece in broadcast.pieces:
        part = _part(broadcast, piece, received)
        if piece.is_odd:
            part = scratch[: piece.num_bytes].copy_(part)
        sink.take(piece.name, _tensor(part, piece))


def _prepared(
    broadcast: ReceiveSpec, received: Tensor, scratch: Tensor, sink: Sink | None
) -> Callable[[], None]:
    """What hands over a broadcast that has landed."""
    if sink is None:
        return lambda: None
    if len(broadcast.pieces) == 1 or any(piece.is_odd for piece in broadcast.pieces):
        return partial(_hand_over, broadcast, received, scratch, sink)
    return sink.prepare(
        [(piece.name, _tensor(_part(broadcast, piece, received), piece)) for piece in broadcast.pieces]
    )


def _part(broadcast: ReceiveSpec, piece: Piece, received: Tensor) -> Tensor:
    return received if broadcast.direct is not None else received[piece.start : piece.start + piece.num_bytes]


def _tensor(raw: Tensor, piece: Piece) -> Tensor:
    return raw.view(piece.dtype).view(piece.shape)


def _options(longest: timedelta | None = None) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    if longest is not None:  # else the group's own, which is for ever
        options.timeout = longest
    options.rootRank = 0
    options.asyncOp = False  # NCCL: on the current stream, not one of the group's
    return options
