"""The parts of a receive that gloo and NCCL share: the plan of the broadcasts and the sink of tensors.

A trainer broadcasts bytes, in an order that the manifest fixes. Each broadcast is received into one of two
receive buffers in turn, so that one is filled while the other is stored, or over NCCL directly into the
staging memory of its tensor. A receive is *posted* once gloo or NCCL has been asked for it: from then on it
may write to the memory at any time, and it cannot be withdrawn. A tensor in a flattened bucket is
*misaligned* if its offset is no multiple of its item size: torch then cannot view the bytes as its dtype, and
they are copied to scratch memory first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from segue.memory import backing
from segue.messages.weight_operations import Bucket, Manifest
from segue.weight_update.manifest import dtype_name


class Sink(Protocol):
    """Stores received tensors; the receiver's thread calls it.

    `store`, and the function that `prepare` returns, must not allocate CUDA memory: a receive may be posted.
    """

    def direct(self, name: str) -> Tensor | None:
        """Returns a contiguous CUDA tensor of the sent dtype and the whole shape to receive into; or None."""

    def store(self, name: str, tensor: Tensor) -> None:
        """Keep this rank's shard of a received whole tensor; called once per tensor, in order.

        ``tensor`` is the one that `direct` returned, if any. Any other tensor is overwritten later: on CUDA
        by later work of the current stream, on the host as soon as this method has returned.
        """

    def prepare(self, tensors: Sequence[tuple[str, Tensor]]) -> Callable[[], None]:
        """Returns a function that stores all these tensors as `store` does, each time they were received."""


@dataclass(slots=True)
class Piece:
    """One tensor of a broadcast."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    start: int  # byte offset in the broadcast
    num_bytes: int

    @property
    def is_misaligned(self) -> bool:
        """Whether its offset is no multiple of its item size, so that no view of its dtype starts there."""
        return self.start % self.dtype.itemsize != 0


@dataclass(slots=True)
class ReceiveSpec:
    """One broadcast to receive, and the tensors in it."""

    num_bytes: int
    pieces: list[Piece]
    direct: Tensor | None  # the tensor to receive into; None: a receive buffer
    bucket: int  # index of the bucket that it belongs to
    num_buckets: int  # buckets that are complete once this broadcast is received


class ReceiveObserver(Protocol):
    """Is told of the progress of a receive."""

    def check(self) -> None:
        """Raise if the session has ended."""

    def ready(self) -> None:
        """The trainer may broadcast: the first receive is posted, or will be posted without more waiting."""

    def received(self, broadcast: ReceiveSpec) -> None:
        """``broadcast`` is in its receive buffer, or in its direct tensor."""

    def stored(self, broadcast: ReceiveSpec) -> None:
        """The sink has stored all tensors of ``broadcast``."""


def plan(manifest: Manifest, sink: Sink | None, device: torch.device) -> list[ReceiveSpec]:
    """Returns the broadcasts of a valid manifest: one per bucket if flattened, else one per tensor.

    Empty broadcasts are among them. ``sink`` says which tensors are received directly into their staging
    memory; None: none is.
    """
    broadcasts = []
    for index, bucket in enumerate(manifest.buckets):
        pieces = list(_pieces(bucket, manifest.flattened))
        if manifest.flattened:
            num_bytes = sum(piece.num_bytes for piece in pieces)
            broadcasts.append(ReceiveSpec(num_bytes, pieces, None, index, index + 1))
            continue
        for number, piece in enumerate(pieces, 1):
            direct = sink.direct(piece.name) if sink is not None and device.type == "cuda" else None
            done = index + (number == len(pieces))  # its own bucket is complete with the last tensor
            broadcasts.append(ReceiveSpec(piece.num_bytes, [piece], direct, index, done))
    return broadcasts


def _pieces(bucket: Bucket, flattened: bool) -> Iterator[Piece]:
    """Yields the tensors of a bucket; their offsets count from the start of their broadcast."""
    start = 0
    for name, text, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        dtype = getattr(torch, dtype_name(text) or text)
        num_bytes = math.prod(shape) * dtype.itemsize
        yield Piece(name, dtype, shape, start, num_bytes)
        start += num_bytes if flattened else 0


def receive_buffer_size(broadcasts: list[ReceiveSpec]) -> int:
    """Returns the bytes of the largest broadcast that needs a receive buffer; 0 if none does."""
    return max((b.num_bytes for b in broadcasts if b.direct is None), default=0)


def allocate_buffers(
    broadcasts: list[ReceiveSpec],
    device: torch.device,
    slack: int = 0,
    pinned: bool = False,
    kept: list[Tensor] | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Returns two receive buffers for the largest broadcast, and scratch for the largest misaligned tensor.

    ``slack``: bytes beyond the largest broadcast; ``kept``: receive buffers to use instead of new ones;
    ``pinned``: whether receive buffers on the host are pinned, for fast copies to a CUDA device. Scratch on
    the host is never pinned: the next tensor overwrites it, and only from pageable memory has a copy to a
    CUDA device read everything when the call returns.
    """

    def allocate(size: int, pinned: bool) -> Tensor:
        if device.type == "cuda":
            return backing.on_device(size, device)
        return backing.pinned((size,), torch.uint8, torch.device("cuda" if pinned else "cpu"))

    size = receive_buffer_size(broadcasts) + slack
    misaligned = max((p.num_bytes for b in broadcasts for p in b.pieces if p.is_misaligned), default=0)
    return kept or [allocate(size, pinned), allocate(size, pinned)], allocate(misaligned, False)


def views(broadcast: ReceiveSpec, received: Tensor, scratch: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors within the bytes of a broadcast; misaligned ones are copied to ``scratch`` first."""
    for piece in broadcast.pieces:
        part = received[piece.start : piece.start + piece.num_bytes]
        if piece.is_misaligned:
            part = scratch[: piece.num_bytes].copy_(part)
        yield piece.name, part.view(piece.dtype).view(piece.shape)


def hand_over(broadcast: ReceiveSpec, received: Tensor, scratch: Tensor, sink: Sink) -> None:
    """Give each tensor of a received broadcast to the sink."""
    for name, tensor in views(broadcast, received, scratch):
        sink.store(name, tensor)


def broadcast_options(timeout: timedelta | None = None) -> dist.BroadcastOptions:
    """Returns the options of a broadcast from rank 0; ``timeout`` None: the group's own, `FOREVER`."""
    options = dist.BroadcastOptions()
    if timeout is not None:
        options.timeout = timeout
    options.rootRank = 0
    options.asyncOp = False  # NCCL then uses the current stream, not a stream of the group
    return options
