"""The process group that a trainer hosts as rank 0, besides any groups of its own, and broadcasts over it."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from segue.memory.nccl_buffers import can_register
from segue.messages.weight_operations import Group
from segue.trainer.buckets import TensorBucket, as_bytes
from segue.weight_update.transport.base import broadcast_options
from segue.weight_update.transport.group import (
    ANNOUNCED_KEY,
    MAX_CTAS_KEY,
    REGISTERED_KEY,
    JoinedGroup,
    make_backend,
    prefixed,
)

MARGIN_S = 600.0  # torch's own deadlines are later than ours by so much
LEAVE_S = 10.0
STAND_IN_S = 1.0  # per connection that stands in for missing engines, see `TrainerGroup.leave`
CHECK_S = 0.1
AHEAD = 2  # buckets in flight on CUDA, each with its own buffer
BACKLOG = 2048  # engines that may connect before the store accepts them
POLL_S = 0.0005  # between two queries of the device


@dataclass(eq=False)
class TrainerGroup:
    """A process group with this trainer as rank 0; call :meth:`wait` before the first broadcast.

    The constructor joins in a thread of its own and returns at once. An engine that builds its communicator
    only in its first receive delays :meth:`wait` alone.
    """

    group: Group
    device: torch.device  # of the tensors to broadcast: a CUDA device for NCCL
    timeout_s: float
    max_ctas: int | None = None  # the limit of NCCL's CTAs, here and in the engines; None: NCCL's default
    listener: socket.socket | None = None  # at the port, and is taken over; None: torch listens

    def __post_init__(self) -> None:
        # All broadcasts share these streams: torch reuses freed memory for the stream that allocated it only.
        is_cuda = self.device.type == "cuda"
        self.streams = [torch.cuda.Stream(self.device) for _ in range(2)] if is_cuda else []  # type: ignore[no-untyped-call]
        self._store: Store | None = None  # the group's part of the store
        # Set once all ranks are in the store and it has all keys that engines read, or joining has failed.
        self.has_met = threading.Event()
        self._num_buckets = 0  # announced so far
        self._registers = False  # whether the memory of flattened buckets is registered with NCCL
        self._timeout = timedelta(seconds=self.timeout_s + MARGIN_S)
        self._joined: JoinedGroup | None = None
        self._error: Exception | None = None
        self._left = False
        self._lock = threading.Lock()
        self._joining = threading.Thread(target=self._join, name="join-weight-group", daemon=True)
        self._joining.start()

    def wait(self, timeout_s: float, check: Callable[[], None]) -> None:
        """Wait until all ranks have joined; ``check`` is called every 0.1 s and may raise.

        Raises:
            TimeoutError: not all ranks joined in time.
            RuntimeError: joining failed in torch.
        """
        deadline = time.monotonic() + timeout_s
        while self._joining.is_alive() and time.monotonic() < deadline:
            check()
            self._joining.join(CHECK_S)
        name = self.group.name
        if self._error is not None:
            # The words of NCCL until 2.29, and since.
            shared = any(words in str(self._error) for words in ("Duplicate GPU", "using the same GPU"))
            hint = "; NCCL cannot connect two processes on one GPU: use backend='gloo'" if shared else ""
            raise RuntimeError(f"the group {name!r} was not joined: {self._error}{hint}") from self._error
        if self._joined is None:
            raise TimeoutError(
                f"not all engines joined the group {name!r} within {timeout_s:g} s; see their logs, or raise "
                "timeout_s"
            )

    def announce(self) -> None:
        """Announce the next bucket in the store; with NCCL, to be called before each bucket.

        Engines queue a receive only for an announced bucket, since a waiting NCCL kernel keeps SMs busy.
        """
        store = self._store
        self._alive()
        assert store is not None
        self._num_buckets += 1
        store.set(ANNOUNCED_KEY, str(self._num_buckets))

    def buffers(self, num_bytes: int, count: int) -> list[Tensor]:
        """Returns ``count`` buffers of at least ``num_bytes`` bytes each, for flattened buckets.

        With NCCL they are registered (`register` does it once): NCCL then sends directly from them. They are
        kept and reused for as long as the group exists.

        Raises:
            RuntimeError: the group was left.
            torch.OutOfMemoryError: there is too little memory.
        """
        if not self._registers:
            return [torch.empty(num_bytes, dtype=torch.uint8, device=self.device) for _ in range(count)]
        joined = self._alive()
        registered = joined.registered_buffers(num_bytes, count)
        joined.register(registered)
        return registered.buffers

    def broadcast(self, tensor: Tensor) -> Any:
        """Begin to broadcast a contiguous tensor on :attr:`device`.

        With NCCL the broadcast is queued on the current stream; with gloo, call ``wait()`` of the result.
        """
        return self._alive().process_group.broadcast([tensor], broadcast_options())

    def leave(self) -> None:
        """Close the store and all connections, even during a broadcast; the port is free soon after.

        Takes at most `LEAVE_S`; operations that cannot be ended are left behind with their thread.
        """
        with self._lock:
            self._left, self._store = True, None
            joined, self._joined = self._joined, None
        if joined is not None:
            joined.mark_dead("it was left")
            joined.wait_ended(LEAVE_S)
        # The rendezvous waits for a number of clients and cannot be cancelled, so this thread connects in
        # place of the missing ones. Each try is short: the store may close in the middle of it.
        deadline, group = time.monotonic() + LEAVE_S, self.group
        while self._joining.is_alive() and time.monotonic() < deadline:
            with suppress(RuntimeError):
                timeout = timedelta(seconds=STAND_IN_S)
                TCPStore(
                    group.master_address,
                    group.master_port,
                    group.world_size,
                    is_master=False,
                    timeout=timeout,
                )

    def _join(self) -> None:
        """The joining thread: hosts the store, waits there for all ranks, and makes the process group.

        A failure is left in `_error`, for `wait`; a group that was left meanwhile is closed again.
        """
        group = self.group
        try:
            # torch's `rendezvous` hosts no store in a process that torchrun has started.
            host, port, timeout = group.master_address, group.master_port, self._timeout
            store = TCPStore(
                host,
                port,
                group.world_size,
                is_master=True,
                timeout=timeout,
                multi_tenant=True,
                master_listen_fd=None if self.listener is None else self.listener.detach(),
            )
            if self._left:  # `leave` has connected in place of the missing engines
                return
            joined = self._make(store)
        except Exception as error:
            # The frames of its traceback would keep the store, and so its port.
            self._error, self._store = error.with_traceback(None), None
            self.has_met.set()
            return
        with self._lock:
            if not self._left:
                self._joined = joined
                return
            self._store = None
        joined.mark_dead("it was left")

    def _make(self, store: Store) -> JoinedGroup:
        """Returns the process group; with NCCL writes first what the engines must know to build the same one.

        `has_met` is set before this thread blocks until the engines build theirs.
        """
        self._store = ours = prefixed(store, self.group)
        if self.group.backend == "gloo":
            self.has_met.set()
            made = make_backend(store, self.group, rank=0, timeout=self._timeout)
        else:
            ours.set(ANNOUNCED_KEY, "0")
            if self.max_ctas is not None:
                ours.set(MAX_CTAS_KEY, str(self.max_ctas))
            made = make_backend(store, self.group, rank=0, timeout=self._timeout)
            self._registers = can_register(made, self.device)
            if self._registers:
                ours.set(REGISTERED_KEY, "1")
            self.has_met.set()
            # Build the communicator now, so that no broadcast waits for it.
            made.eager_connect_single_device(self.device)  # type: ignore[attr-defined]
        return JoinedGroup(self.group, 0, self.device, store, None, made)

    def _alive(self) -> JoinedGroup:
        """Returns the group; raises RuntimeError if it was left."""
        joined = self._joined
        if joined is None:
            raise RuntimeError(f"the group {self.group.name!r} was left")
        return joined


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
        # On CUDA: bucket, the event at its end, and its pieces, which must stay alive until then.
        self._in_flight = deque[tuple[TensorBucket, torch.cuda.Event, list[Tensor]]]()
        is_cuda = self.group.device.type == "cuda"
        # None: not on CUDA. The caller's work up to here, which may still write the weights.
        self._ready_event = torch.cuda.current_stream(self.group.device).record_event() if is_cuda else None
        threading.Thread(target=self._run, name="broadcast-weights", daemon=True).start()

    def stop(self) -> None:
        """Begin no further broadcasts; those in flight end with their group, or never."""
        self._stopped = True

    def _run(self) -> None:
        """The thread: sends all buckets, then sets `finished`; before that `error`, if sending has failed."""
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
        """Send over gloo, one broadcast after the other."""
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
        """Raise if the broadcast was stopped."""
        if self._stopped:
            raise RuntimeError("the broadcast was stopped")

    def _count_sent(self, bucket: TensorBucket) -> None:
        self.num_buckets += 1
        self.num_bytes += bucket.num_bytes
        self.on_sent(self)

    def _pieces(self, index: int, bucket: TensorBucket) -> Iterator[Tensor]:
        """Yields what to broadcast for bucket number ``index``, one after the other, as bytes.

        A flattened bucket is one piece: its tensors are packed into a buffer, which a later bucket reuses.
        """
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
        """Yields the bucket's tensors from the weights; raises if they are not as they were planned."""
        for name, planned in bucket.tensors.items():
            found, tensor = next(self.tensors)
            if (found, tensor.dtype, tensor.shape) != (name, planned.dtype, planned.shape):
                raise RuntimeError(
                    f"tensor {name!r}: the weights changed their names, dtypes or shapes during the send; "
                    "change them only between sends"
                )
            yield tensor


def listen_at(wanted: int | None) -> socket.socket:
    """Returns a socket that listens at the port ``wanted`` on all addresses, or at any port if it is taken.

    The group gets the socket itself: a port that is only known to be free may be taken before it is used.

    Raises:
        OSError: no port is free.
    """
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    for port in (wanted or 0, 0):
        with suppress(OSError):
            return socket.create_server(("", port), family=family, backlog=BACKLOG, dualstack_ipv6=is_dual)
    raise OSError("no TCP port is free for the process group of the weights; end programs that use ports")
