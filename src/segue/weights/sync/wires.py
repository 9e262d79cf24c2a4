"""How broadcasts are received: over gloo into host memory, over NCCL into the device's."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from segue.errors import WeightSyncError
from segue.protocol.weights import Bucket, Manifest
from segue.weights.sync.groups import JoinedGroup

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
    """Where landed tensors go; called from the receiver's thread, where nothing is allocated on CUDA."""

    def direct(self, name: str) -> Tensor | None:
        """A contiguous CUDA tensor of the wire's dtype and the whole shape, to receive into; or None."""

    def take(self, name: str, tensor: Tensor) -> None:
        """Keep this rank's part of a whole tensor that has landed; once for each, in order.

        ``tensor`` is that of `direct` where there was one; any other is overwritten later: by work on the
        current stream, if it is on CUDA, else when this returns.
        """


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
class Broadcast:
    """What one collective brings."""

    num_bytes: int
    pieces: list[Piece]
    direct: Tensor | None  # where it lands, if not in a landing buffer
    num_buckets: int  # that are there when this one is


class Session(Protocol):
    """Whom a wire tells how far it is."""

    def check(self) -> None:
        """Raise if the session is over."""

    def entered(self) -> None:
        """The thread is inside the first broadcast."""

    def landed(self, broadcast: Broadcast) -> None:
        """A broadcast was received."""

    def taken(self, broadcast: Broadcast) -> None:
        """The sink has it."""


def plan(manifest: Manifest, sink: Sink | None, device: torch.device) -> list[Broadcast]:
    """The broadcasts of a manifest, in order: one a bucket, or one a tensor; empty ones are sent too."""
    broadcasts = []
    for index, bucket in enumerate(manifest.buckets):
        pieces = list(_pieces(bucket, manifest.flattened))
        if manifest.flattened:
            broadcasts.append(Broadcast(sum(piece.num_bytes for piece in pieces), pieces, None, index + 1))
            continue
        for number, piece in enumerate(pieces, 1):
            direct = sink.direct(piece.name) if sink is not None and device.type == "cuda" else None
            done = index + (number == len(pieces))
            broadcasts.append(Broadcast(piece.num_bytes, [piece], direct, done))
    return broadcasts


class HostWire:
    """gloo: the next broadcast is on its way while the last one is taken."""

    def __init__(self, group: JoinedGroup, broadcasts: list[Broadcast], sink: Sink | None) -> None:
        """``sink``: None drops what comes."""
        self._group, self._broadcasts, self._sink = group, broadcasts, sink
        device = group.engine_device
        pinned = device.type == "cuda"
        self._stream = group.streams[1] if pinned else None
        slack = _SLACK_PINNED if pinned else _SLACK
        self._landing, self._scratch = _buffers(broadcasts, group.device, slack, pinned)
        # gloo broadcasts down a tree; a rank with others below it sends them as much as it asked for itself.
        rank, size = group.rank, group.group.world_size
        self._is_leaf = rank + (1 << rank.bit_length()) >= size
        self._under_way: deque[tuple[Broadcast, Tensor, dist.Work]] = deque()
        self._is_waiting = False  # and will look whether the session is over before it does anything

    def receive(self, session: Session) -> None:
        """Receive all; raises what the group or the sink raises."""
        process_group = self._group.process_group
        with self._stream or nullcontext():
            for index, broadcast in enumerate(self._broadcasts):
                if len(self._under_way) == len(self._landing):
                    self._settle(session)
                session.check()
                landing = self._landing[index % 2]
                target = landing if self._is_leaf else landing[: broadcast.num_bytes]
                _mark(landing, broadcast.num_bytes)
                self._under_way.append((broadcast, landing, process_group.broadcast([target], _options())))
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

    def _settle(self, session: Session) -> None:
        broadcast, landing, work = self._under_way[0]
        self._is_waiting = True
        work.wait()
        self._under_way.popleft()
        session.check()
        self._is_waiting = False
        _check_marks(landing, broadcast)
        session.landed(broadcast)
        if self._sink is not None:
            _hand_over(broadcast, landing, self._scratch, self._sink)
        if self._stream is not None:
            self._stream.synchronize()
        session.taken(broadcast)


class CudaWire:
    """NCCL: one stream receives, one copies; the host looks at events and waits for nothing it cannot leave.

    Everything on the device is taken before the first receive.
    """

    def __init__(self, group: JoinedGroup, broadcasts: list[Broadcast], sink: Sink | None) -> None:
        """``sink``: None drops what comes."""
        self._group, self._broadcasts, self._sink = group, broadcasts, sink
        device = group.device
        # From the default stream's pool of memory, whichever streams torch gives: the next session finds it.
        default = torch.cuda.default_stream(device)
        self._landing, self._scratch = _buffers(broadcasts, device)
        self._wire, self._copies = group.streams
        self._wire.wait_stream(default)
        self._copies.wait_stream(default)
        self._landed = [self._wire.record_event() for _ in range(_AHEAD)]
        self._copied = [self._copies.record_event() for _ in range(_AHEAD)]
        self._under_way: deque[tuple[Broadcast, torch.Event]] = deque()

    def receive(self, session: Session) -> None:
        """Receive all; raises what the group or the sink raises."""
        process_group = self._group.process_group
        last: list[torch.Event | None] = [None, None]  # copies out of each landing buffer
        turns = count()
        for index, broadcast in enumerate(self._broadcasts):
            if len(self._under_way) == _AHEAD:
                self._settle(session)
            session.check()
            landed, copied = self._landed[index % _AHEAD], self._copied[index % _AHEAD]
            turn = 0 if broadcast.direct is not None else next(turns) % 2
            target = _target(broadcast, self._landing[turn])
            if broadcast.direct is None:
                before, last[turn] = last[turn], copied
                if before is not None:
                    self._wire.wait_event(before)
            if index == 0:  # said before: a trainer may build its communicator no sooner than it broadcasts
                session.entered()
            with self._wire:
                process_group.broadcast([target], _options())
                landed.record(self._wire)
            with self._copies:
                self._copies.wait_event(landed)
                if self._sink is not None:
                    _hand_over(broadcast, target, self._scratch, self._sink)
                copied.record(self._copies)
            self._under_way.append((broadcast, copied))
        while self._under_way:
            self._settle(session)

    def drain(self) -> None:
        """Return when no memory is touched any more: kernels of an aborted communicator end too."""
        with suppress(Exception):
            while not (self._wire.query() and self._copies.query()):
                time.sleep(_POLL_S[1])

    def abandon(self) -> bool:
        """Never: what is queued on the device writes until it has ended."""
        return False

    def _settle(self, session: Session) -> None:
        broadcast, copied = self._under_way.popleft()
        pause_s, longest_s = _POLL_S
        while not copied.query():
            session.check()
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, longest_s)
        session.landed(broadcast)
        session.taken(broadcast)


def _pieces(bucket: Bucket, flattened: bool) -> Iterator[Piece]:
    start = 0
    for name, text, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        dtype = getattr(torch, text.removeprefix("torch."))
        num_bytes = math.prod(shape) * dtype.itemsize
        yield Piece(name, dtype, shape, start, num_bytes)
        start += num_bytes if flattened else 0


def _buffers(
    broadcasts: list[Broadcast], device: torch.device, slack: int = 0, pinned: bool = False
) -> tuple[list[Tensor], Tensor]:
    """Two landing buffers for the largest broadcast, and one for the largest tensor at an odd offset."""
    landing = max((b.num_bytes for b in broadcasts if b.direct is None), default=0) + slack
    odd = max((p.num_bytes for b in broadcasts for p in b.pieces if p.is_odd), default=0)
    first, second, scratch = (
        torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned and size > 0)
        for size in (landing, landing, odd)
    )
    return [first, second], scratch


def _mark(landing: Tensor, num_bytes: int) -> None:
    landing[num_bytes : num_bytes + len(_MARK)] = _MARK
    if num_bytes >= len(_MARK):
        landing[num_bytes - len(_MARK) : num_bytes] = _MARK


def _check_marks(landing: Tensor, broadcast: Broadcast) -> None:
    end, size = broadcast.num_bytes, len(_MARK)
    less = end >= size and landing[end - size : end].equal(_MARK)
    if less or not landing[end : end + size].equal(_MARK):
        names = [piece.name for piece in broadcast.pieces]
        words = (
            f"{names[0]!r} .. {names[-1]!r}" if len(names) > 1 else f"{names[0]!r}" if names else "nothing"
        )
        raise WeightSyncError(
            f"the trainer broadcast {'less' if less else 'more'} than the {end} bytes that its manifest says "
            f"({words}): both must have the same tensors in the same order"
        )


def _target(broadcast: Broadcast, landing: Tensor) -> Tensor:
    # Bytes, whatever the dtype: a broadcast moves bytes, and no backend knows every dtype.
    if broadcast.direct is not None:
        return broadcast.direct.reshape(-1).view(torch.uint8)
    return landing[: broadcast.num_bytes]


def _hand_over(broadcast: Broadcast, received: Tensor, scratch: Tensor, sink: Sink) -> None:
    if broadcast.direct is not None:
        sink.take(broadcast.pieces[0].name, broadcast.direct)
        return
    for piece in broadcast.pieces:
        part = received[piece.start : piece.start + piece.num_bytes]
        if piece.is_odd:
            part = scratch[: piece.num_bytes].copy_(part)
        sink.take(piece.name, part.view(piece.dtype).view(piece.shape))


def _options() -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.asyncOp = False  # NCCL: on the current stream, not one of the group's
    return options
