"""One pass of broadcasts over all weights, in a thread that can be abandoned."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from segue.trainer.buckets import Bucket, as_bytes
from segue.trainer.group import Group

AHEAD = 2  # buckets in flight on CUDA, each with its landing buffer


class Broadcast:
    """Sends buckets from the moment it is made; every public attribute may be read meanwhile."""

    def __init__(
        self,
        group: Group,
        buckets: Sequence[Bucket],
        tensors: Iterator[tuple[str, Tensor]],
        *,
        flattened: bool,
        on_sent: Callable[[Broadcast], None],
    ) -> None:
        """``flattened``: one ``uint8`` broadcast a bucket, its tensors end to end; else one a tensor.

        On CUDA it sees what the caller's current stream has been given so far.
        """
        self.num_buckets = 0  # sent
        self.num_bytes = 0
        self.error: Exception | None = None
        self.finished = threading.Event()
        self._group, self._buckets, self._tensors = group, buckets, tensors
        self._on_sent = on_sent
        self._send = self._send_flattened if flattened else self._send_tensors
        self._stopped = False
        is_cuda = group.device.type == "cuda"
        self._ready = torch.cuda.current_stream(group.device).record_event() if is_cuda else None
        self._landing: list[Tensor] = []
        run = self._run_cuda if is_cuda else self._run
        threading.Thread(target=self._guard, args=(run,), name="broadcast-weights", daemon=True).start()

    def stop(self) -> None:
        """Send no further bucket; one that is under way ends with its group, or never."""
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
            for work in self._send(index, bucket):
                if self._stopped:
                    return
                work.wait()
            self._count(bucket)

    def _run_cuda(self) -> None:
        assert self._ready is not None
        under_way: deque[tuple[Bucket, torch.cuda.Event]] = deque()
        stream = torch.cuda.Stream(self._group.device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._group.device), torch.cuda.stream(stream):
            stream.wait_event(self._ready)
            for index, bucket in enumerate(self._buckets):
                for work in list(self._send(index, bucket)):
                    work.wait()  # in the stream: what follows there, a landing buffer's next use, waits
                under_way.append((bucket, stream.record_event()))
                self._settle(under_way, AHEAD)
            self._settle(under_way, 0)

    def _settle(self, under_way: deque[tuple[Bucket, torch.cuda.Event]], most: int) -> None:
        """Wait, without blocking the device or being blocked by it, until at most so many are under way."""
        while len(under_way) > most:
            while not under_way[0][1].query():  # type: ignore[no-untyped-call]
                if self._stopped:
                    raise RuntimeError("the broadcast was given up")
                time.sleep(0.0005)
            self._count(under_way.popleft()[0])

    def _count(self, bucket: Bucket) -> None:
        self.num_buckets += 1
        self.num_bytes += bucket.num_bytes
        self._on_sent(self)

    def _send_tensors(self, index: int, bucket: Bucket) -> Iterator[Any]:
        for tensor in self._take(bucket):
            yield self._group.broadcast(tensor.to(self._group.device).contiguous())

    def _send_flattened(self, index: int, bucket: Bucket) -> Iterator[Any]:
        if not self._landing:
            size = max(bucket.num_bytes for bucket in self._buckets)
            count = min(len(self._buckets), AHEAD if self._ready is not None else 1)
            self._landing = [
                torch.empty(size, dtype=torch.uint8, device=self._group.device) for _ in range(count)
            ]
        flat = self._landing[index % len(self._landing)][: bucket.num_bytes]
        start = 0
        for tensor in self._take(bucket):
            flat[start : start + tensor.nbytes].copy_(as_bytes(tensor))
            start += tensor.nbytes
        yield self._group.broadcast(flat)

    def _take(self, bucket: Bucket) -> Iterator[Tensor]:
        for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
            found, tensor = next(self._tensors)
            if (found, str(tensor.dtype), list(tensor.shape)) != (name, f"torch.{dtype}", shape):
                raise RuntimeError(f"tensor {name!r}: the weights changed their names, types or shapes")
            yield tensor
