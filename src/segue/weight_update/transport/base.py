"""What is received and where it goes: the parts that gloo and NCCL share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from segue.messages.weight_update import Bucket, Manifest


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


def _pieces(bucket: Bucket, flattened: bool) -> Iterator[Piece]:
    start = 0
    for name, text, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        dtype = getattr(torch, text.removeprefix("torch."))
        num_bytes = math.prod(shape) * dtype.itemsize
        yield Piece(name, dtype, shape, start, num_bytes)
        start += num_bytes if flattened else 0


def receive_buffer_size(broadcasts: list[ReceiveSpec]) -> int:
    """Bytes of the largest broadcast that is received into a buffer; 0 if there is none."""
    return max((b.num_bytes for b in broadcasts if b.direct is None), default=0)


def allocate_buffers(
    broadcasts: list[ReceiveSpec],
    device: torch.device,
    slack: int = 0,
    pinned: bool = False,
    kept: list[Tensor] | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Two receive buffers for the largest broadcast, and one for the largest tensor at an odd offset."""

    def take(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned and size > 0)

    size = receive_buffer_size(broadcasts) + slack
    odd = max((p.num_bytes for b in broadcasts for p in b.pieces if p.is_odd), default=0)
    return kept or [take(size), take(size)], take(odd)


def hand_over(broadcast: ReceiveSpec, received: Tensor, scratch: Tensor, sink: Sink) -> None:
    """Give each tensor of a received broadcast to the sink; ``scratch`` holds one at an odd offset."""
    for piece in broadcast.pieces:
        part = piece_bytes(broadcast, piece, received)
        if piece.is_odd:
            part = scratch[: piece.num_bytes].copy_(part)
        sink.take(piece.name, as_tensor(part, piece))


def piece_bytes(broadcast: ReceiveSpec, piece: Piece, received: Tensor) -> Tensor:
    """``uint8``: the bytes of one tensor within a received broadcast."""
    return received if broadcast.direct is not None else received[piece.start : piece.start + piece.num_bytes]


def as_tensor(raw: Tensor, piece: Piece) -> Tensor:
    """Returns a view of ``raw`` with the dtype and the shape of ``piece``."""
    return raw.view(piece.dtype).view(piece.shape)


def broadcast_options(longest: timedelta | None = None) -> dist.BroadcastOptions:
    """Options of a broadcast from rank 0; ``longest``: gloo's time-out, or None for the group's own."""
    options = dist.BroadcastOptions()
    if longest is not None:  # else the group's own, which is for ever
        options.timeout = longest
    options.rootRank = 0
    options.asyncOp = False  # NCCL: on the current stream, not one of the group's
    return options
