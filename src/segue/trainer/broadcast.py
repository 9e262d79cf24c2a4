"""One pass of broadcasts over all weights, in a thread that can be abandoned."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from segue.trainer.buckets import TensorBucket, as_bytes
from segue.trainer.group import TrainerGroup

AHEAD = 2  # buckets in flight on CUDA, each with its buffer
POLL_S = 0.0005  # between two looks at the device

_UnderWay = deque[tuple[TensorBucket, torch.cuda.Event, list[Tensor]]]  # the pieces are kept


class BroadcastSender:
    """Sends buckets from the moment it is made; every public attribute may be read meanwhile."""

    def __init__(
        self,
        group: TrainerGroup,
        buckets: Sequence[TensorBucket],
        tensors: Iterator[tuple[str, Tensor]],
        *,
        flattened: bool,
        on_sent: Callable[[BroadcastSender], None],
        gb_per_s: float = math.inf,
    ) -> None:
        """``flattened``: one broadcast a bucket, its tensors' bytes end to end; else one a tensor.

        ``gb_per_s``: at most, from bucket to bucket, on CUDA; may be set meanwhile.

        On CUDA it sees what the caller's current stream has been given so far.
        """
        self.num_buckets = 0  # sent
        self.num_bytes = 0
        self.error: Exception | None = None
        self.finished = threading.Event()
        self._group, self._buckets, self._tensors = group, buckets, tensors
        self._pieces = self._flat if flattened else self._single
        self._on_sent = on_sent
        self.gb_per_s = gb_per_s
        self._stopped = False
        is_cuda = group.device.type == "cuda"
        self._given = torch.cuda.current_stream(group.device).record_event() if is_cuda else None
        self._buffers: list[Tensor] = []
        run = self._run_cuda if is_cuda else self._run
        threading.Thread(target=self._guard, args=(run,), name="broadcast-weights", daemon=True).start()

    def stop(self) -> None:
        """Send nothing further; what is under way ends with its group, or never."""
        self._stopped = True

    def _guard(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:
            self.error = error
        finally:
            self.finished.set()

    def _run(self) -> None:
        for index, bucket in enumerate(self._buckets):
            for piece in self._pieces(index, bucket):
                self._check()
                self._group.broadcast(piece).wait()
            self._count(bucket)

    def _run_cuda(self) -> None:
        """One stream packs, one sends; the host waits for nothing that it cannot leave."""
        assert self._given is not None
        packing, wire = self._group.streams
        packing.wait_event(self._given)
        under_way: _UnderWay = deque()
        began, num_bytes = 0.0, 0  # of the last bucket
        with torch.cuda.device(self._group.device):
            for index, bucket in enumerate(self._buckets):
                if len(under_way) == AHEAD:  # whose buffer is the next one's
                    self._settle(under_way)
                with torch.cuda.stream(packing):
                    pieces = list(self._pieces(index, bucket))
                wire.wait_event(packing.record_event())
                self._rest(under_way, began, num_bytes)
                began, num_bytes = time.monotonic(), bucket.num_bytes
                self._group.announce()
                with torch.cuda.stream(wire):
                    for piece in pieces:
                        self._group.broadcast(piece)
                under_way.append((bucket, wire.record_event(), pieces))
            while under_way:
                self._settle(under_way)

    def _settle(self, under_way: _UnderWay) -> None:
        """Wait for the first bucket under way."""
        while not under_way[0][1].query():  # type: ignore[no-untyped-call]
            self._check()
            time.sleep(POLL_S)
        self._count(under_way.popleft()[0])

    def _rest(self, under_way: _UnderWay, began: float, num_bytes: int) -> None:
        """Announce nothing for as long as so many bytes, announced then, take at `gb_per_s`."""
        while time.monotonic() < began + num_bytes / (1e9 * self.gb_per_s):
            self._check()
            if under_way and under_way[0][1].query():  # type: ignore[no-untyped-call]
                self._settle(under_way)
            else:
                time.sleep(POLL_S)

    def _check(self) -> None:
        if self._stopped:
            raise RuntimeError("the broadcast was given up")

    def _count(self, bucket: TensorBucket) -> None:
        self.num_buckets += 1
        self.num_bytes += bucket.num_bytes
        self._on_sent(self)

    def _single(self, index: int, bucket: TensorBucket) -> Iterator[Tensor]:
        for tensor in self._take(bucket):
            yield as_bytes(tensor.to(self._group.device))

    def _flat(self, index: int, bucket: TensorBucket) -> Iterator[Tensor]:
        if not self._buffers:
            size = max(bucket.num_bytes for bucket in self._buckets)
            count = 1 if self._given is None else min(len(self._buckets), AHEAD)
            self._buffers = self._group.buffers(size, count)
        flat = self._buffers[index % len(self._buffers)][: bucket.num_bytes]
        start = 0
        for tensor in self._take(bucket):
            part, content = flat[start : start + tensor.nbytes], as_bytes(tensor)
            start += tensor.nbytes
            if part.is_cuda:
                part.copy_(content)
            else:  # on this thread alone: torch's others, which train, would have to meet for every tensor
                np.copyto(part.numpy(), content.cpu().numpy())
        yield flat

    def _take(self, bucket: TensorBucket) -> Iterator[Tensor]:
        for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
            found, tensor = next(self._tensors)
            if (found, str(tensor.dtype), list(tensor.shape)) != (name, f"torch.{dtype}", shape):
                raise RuntimeError(f"tensor {name!r}: the weights changed their names, types or shapes")
            yield tensor
