"""Broadcasts all weights once, in a thread that the caller need not wait for."""

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

AHEAD = 2  # buckets in flight on CUDA, each with its own buffer
POLL_S = 0.0005  # between two queries of the device

_InFlight = deque[tuple[TensorBucket, torch.cuda.Event, list[Tensor]]]  # bucket, its end, its pieces


class BroadcastSender:
    """Broadcasts buckets; begins in its constructor. Any thread may read the public attributes meanwhile."""

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
        """``flattened``: one broadcast per bucket, with its tensors' bytes end to end; else one per tensor.

        ``gb_per_s``: limits the rate from the start of one bucket to the next, on CUDA; may be changed
        meanwhile.

        On CUDA the broadcasts wait for the work that is queued on the caller's current stream.
        """
        self.num_buckets = 0  # sent so far
        self.num_bytes = 0  # sent so far
        self.error: Exception | None = None
        self.finished = threading.Event()
        self._group, self._buckets, self._tensors = group, buckets, tensors
        self._pieces = self._flattened if flattened else self._one_by_one
        self._on_sent = on_sent
        self.gb_per_s = gb_per_s
        self._stopped = False
        is_cuda = group.device.type == "cuda"
        self._ready_event = torch.cuda.current_stream(group.device).record_event() if is_cuda else None
        self._buffers: list[Tensor] = []
        run = self._run_cuda if is_cuda else self._run
        threading.Thread(target=self._run_guarded, args=(run,), name="broadcast-weights", daemon=True).start()

    def stop(self) -> None:
        """Begin no further broadcasts; those in flight end with their group, or never."""
        self._stopped = True

    def _run_guarded(self, run: Callable[[], None]) -> None:
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
            self._count_sent(bucket)

    def _run_cuda(self) -> None:
        """Pack on one stream and send on another; the host polls events, so that it can stop."""
        assert self._ready_event is not None
        packing, sending = self._group.streams
        packing.wait_event(self._ready_event)
        in_flight: _InFlight = deque()
        began, num_bytes = 0.0, 0  # start and size of the last bucket
        with torch.cuda.device(self._group.device):
            for index, bucket in enumerate(self._buckets):
                if len(in_flight) == AHEAD:  # the next bucket reuses the buffer of the oldest one
                    self._wait_oldest(in_flight)
                with torch.cuda.stream(packing):
                    pieces = list(self._pieces(index, bucket))
                sending.wait_event(packing.record_event())
                self._throttle(in_flight, began, num_bytes)
                began, num_bytes = time.monotonic(), bucket.num_bytes
                self._group.announce()
                with torch.cuda.stream(sending):
                    for piece in pieces:
                        self._group.broadcast(piece)
                in_flight.append((bucket, sending.record_event(), pieces))
            while in_flight:
                self._wait_oldest(in_flight)

    def _wait_oldest(self, in_flight: _InFlight) -> None:
        """Wait for the oldest bucket in flight, and count it."""
        while not in_flight[0][1].query():  # type: ignore[no-untyped-call]
            self._check()
            time.sleep(POLL_S)
        self._count_sent(in_flight.popleft()[0])

    def _throttle(self, in_flight: _InFlight, began: float, num_bytes: int) -> None:
        """Wait until ``num_bytes``, sent since ``began`` at `gb_per_s`, would be complete."""
        while time.monotonic() < began + num_bytes / (1e9 * self.gb_per_s):
            self._check()
            if in_flight and in_flight[0][1].query():  # type: ignore[no-untyped-call]
                self._wait_oldest(in_flight)
            else:
                time.sleep(POLL_S)

    def _check(self) -> None:
        if self._stopped:
            raise RuntimeError("the broadcast was stopped")

    def _count_sent(self, bucket: TensorBucket) -> None:
        self.num_buckets += 1
        self.num_bytes += bucket.num_bytes
        self._on_sent(self)

    def _one_by_one(self, index: int, bucket: TensorBucket) -> Iterator[Tensor]:
        for tensor in self._next_tensors(bucket):
            yield as_bytes(tensor.to(self._group.device))

    def _flattened(self, index: int, bucket: TensorBucket) -> Iterator[Tensor]:
        if not self._buffers:
            size = max(bucket.num_bytes for bucket in self._buckets)
            count = 1 if self._ready_event is None else min(len(self._buckets), AHEAD)
            self._buffers = self._group.buffers(size, count)
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
        for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
            found, tensor = next(self._tensors)
            if (found, str(tensor.dtype), list(tensor.shape)) != (name, f"torch.{dtype}", shape):
                raise RuntimeError(
                    f"tensor {name!r}: the weights changed their names, dtypes or shapes during the send"
                )
            yield tensor
