"""Broadcasts all weights once, in a thread that the caller need not wait for."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch
from torch import Tensor

from segue.trainer.buckets import TensorBucket, as_bytes
from segue.trainer.group import TrainerGroup

AHEAD = 2  # buckets in flight on CUDA, each with its own buffer
POLL_S = 0.0005  # between two queries of the device


@dataclass(eq=False, repr=False)
class BroadcastSender:
    """Broadcasts buckets; begins in its constructor. Any thread may read the attributes meanwhile.

    On CUDA the broadcasts wait for the work that is queued on the caller's current stream.
    """

    group: TrainerGroup
    buckets: Sequence[TensorBucket]
    tensors: Iterator[tuple[str, Tensor]]
    _: KW_ONLY
    flattened: bool  # one broadcast per bucket, with its tensors' bytes end to end; else one per tensor
    on_sent: Callable[[BroadcastSender], None]
    gb_per_s: float = math.inf  # limit from one bucket's start to the next's, on CUDA; may be changed later

    def __post_init__(self) -> None:
        self.num_buckets = self.num_bytes = 0  # sent so far
        self.error: Exception | None = None
        self.finished = threading.Event()
        self._stopped = False
        self._buffers: list[Tensor] = []
        self._in_flight = deque[tuple[TensorBucket, torch.cuda.Event, list[Tensor]]]()  # with end, and pieces
        is_cuda = self.group.device.type == "cuda"
        self._ready_event = torch.cuda.current_stream(self.group.device).record_event() if is_cuda else None
        threading.Thread(target=self._run, name="broadcast-weights", daemon=True).start()

    def stop(self) -> None:
        """Begin no further broadcasts; those in flight end with their group, or never."""
        self._stopped = True

    def _run(self) -> None:
        try:
            if self._ready_event is None:
                self._send()
            else:
                self._send_cuda(self._ready_event)
        except Exception as error:
            self.error = error
        finally:
            self.finished.set()

    def _send(self) -> None:
        for index, bucket in enumerate(self.buckets):
            for piece in self._pieces(index, bucket):
                self._check()
                self.group.broadcast(piece).wait()
            self._count_sent(bucket)

    def _send_cuda(self, ready: torch.cuda.Event) -> None:
        """Pack on one stream and send on another; the host polls events, so that it can stop."""
        packing, sending = self.group.streams
        packing.wait_event(ready)
        began, num_bytes = 0.0, 0  # start and size of the last bucket
        with torch.cuda.device(self.group.device):
            for index, bucket in enumerate(self.buckets):
                if len(self._in_flight) == AHEAD:  # the next bucket reuses the buffer of the oldest one
                    self._wait_oldest()
                with torch.cuda.stream(packing):
                    pieces = list(self._pieces(index, bucket))
                sending.wait_event(packing.record_event())
                self._throttle(began, num_bytes)
                began, num_bytes = time.monotonic(), bucket.num_bytes
                self.group.announce()
                with torch.cuda.stream(sending):
                    for piece in pieces:
                        self.group.broadcast(piece)
                self._in_flight.append((bucket, sending.record_event(), pieces))
            while self._in_flight:
                self._wait_oldest()

    def _wait_oldest(self) -> None:
        """Wait for the oldest bucket in flight, and count it."""
        while not self._in_flight[0][1].query():  # type: ignore[no-untyped-call]
            self._check()
            time.sleep(POLL_S)
        self._count_sent(self._in_flight.popleft()[0])

    def _throttle(self, began: float, num_bytes: int) -> None:
        """Wait until ``num_bytes``, sent since ``began`` at `gb_per_s`, would be complete."""
        while time.monotonic() < began + num_bytes / (1e9 * self.gb_per_s):
            self._check()
            if self._in_flight and self._in_flight[0][1].query():  # type: ignore[no-untyped-call]
                self._wait_oldest()
            else:
                time.sleep(POLL_S)

    def _check(self) -> None:
        if self._stopped:
            raise RuntimeError("the broadcast was stopped")

    def _count_sent(self, bucket: TensorBucket) -> None:
        self.num_buckets += 1
        self.num_bytes += bucket.num_bytes
        self.on_sent(self)

    def _pieces(self, index: int, bucket: TensorBucket) -> Iterator[Tensor]:
        """Yields what to broadcast for a bucket, one after the other, as bytes."""
        if not self.flattened:
            for tensor in self._next_tensors(bucket):
                yield as_bytes(tensor.to(self.group.device))
            return
        if not self._buffers:
            size = max(bucket.num_bytes for bucket in self.buckets)
            count = 1 if self._ready_event is None else min(len(self.buckets), AHEAD)
            self._buffers = self.group.buffers(size, count)
        flat = self._buffers[index % len(self._buffers)][: bucket.num_bytes]
        start = 0
        for tensor in self._next_tensors(bucket):
            part, content = flat[start : start + tensor.nbytes], as_bytes(tensor)
            start += tensor.nbytes
            if part.is_cuda:
                part.copy_(content)
            else:  # numpy uses this thread alone; torch would synchronise the threads that train, per tensor
                np.copyto(part.numpy(), content.cpu().numpy())
        yield flat

    def _next_tensors(self, bucket: TensorBucket) -> Iterator[Tensor]:
        for name, planned in bucket.tensors.items():
            found, tensor = next(self.tensors)
            if (found, tensor.dtype, tensor.shape) != (name, planned.dtype, planned.shape):
                raise RuntimeError(
                    f"tensor {name!r}: the weights changed their names, dtypes or shapes during the send"
                )
            yield tensor
