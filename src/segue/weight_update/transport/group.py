"""A joined process group: its liveness, the trainer's entries in the store, its communicator and buffers."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store

from segue.errors import WeightSyncError
from segue.logs import logger
from segue.memory.nccl_buffers import GRANULARITY, RegisteredBuffers, can_register
from segue.messages.weight_operations import Group
from segue.sizes import round_up

# The timeout of stores and operations: longer than any session. The waiting threads keep shorter deadlines.
FOREVER = timedelta(days=1)
# A trainer that limits the CTAs of its communicator writes their number under this key into the group's
# store: ranks with different numbers build different channels, and hang.
MAX_CTAS_KEY = "max_ctas"
# The number of buckets that the trainer has begun to broadcast since the group was made. A trainer that
# announces its buckets sets the key before it asks an engine to receive.
ANNOUNCED_KEY = "announced"
# Set, before an engine is asked to receive, by a trainer that sends flattened buckets from buffers registered
# with NCCL: either all ranks of a communicator must register their buffers, or none.
REGISTERED_KEY = "registered"
# torch reads these when it makes an NCCL group: without the watchdog, no error or timeout ends the process.
_WITHOUT_WATCHDOG = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
_STUCK_S = 0.2  # a thread that has not ended after so long is taken for stuck
_environment = threading.Lock()


@dataclass(eq=False)
class JoinedGroup:
    """A process group that this rank, of an engine or the trainer, has joined; usable until it is dead."""

    group: Group
    rank: int
    engine_device: torch.device
    _store: Store
    _link: socket.socket | None  # idle, to the trainer's store, and closed when it ends; None: at the trainer
    _process_group: ProcessGroup | None  # None for NCCL: it is made at its first use, see `MAX_CTAS_KEY`
    reason: str | None = None  # why it is dead; None: alive
    num_buckets: int = 0  # of all sessions that were received so far
    _num_announced: int = 0  # the last known value of `ANNOUNCED_KEY`
    _is_communicator_built: bool = False
    _registered: tuple[RegisteredBuffers, ...] = ()
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closing: threading.Thread | None = None
    _threads: Sequence[threading.Thread] = ()  # of the last receiver
    _idle: threading.Event | None = None  # set once these threads touch no memory any more

    @property
    def device(self) -> torch.device:
        """The device of the receive buffers."""
        return self.engine_device if self.group.backend == "nccl" else torch.device("cpu")

    @property
    def alive(self) -> bool:
        """Whether the trainer's store is reachable and nothing has failed so far."""
        if self.reason is None and not self.connected:
            self.mark_dead("its trainer has gone")
        return self.reason is None

    @property
    def connected(self) -> bool:
        """Whether the connection to the trainer's store is open."""
        if self._link is None:
            return True
        try:
            return self._link.recv(1, socket.MSG_PEEK) != b""  # an empty read: the trainer has closed it
        except BlockingIOError:  # nothing to read, as long as the connection is open
            return True
        except OSError:
            return False

    @property
    def peer(self) -> tuple[str, int] | None:
        """The address of the trainer's store; None once the connection is closed."""
        try:
            return None if self._link is None else cast(tuple[str, int], self._link.getpeername()[:2])
        except OSError:
            return None

    @cached_property
    def streams(self) -> tuple[torch.Stream, torch.Stream]:
        """Two streams of the engine's CUDA device: one for receives, one for the copies of received tensors.

        torch hands out 32 streams in turn and then repeats them. So all sessions of a group share these two,
        which have another priority than the stream of the steps: otherwise a receive could be queued there.
        """
        return torch.Stream(self.engine_device), torch.Stream(self.engine_device)

    @cached_property
    def announces(self) -> bool:
        """Whether the trainer announces each bucket before it broadcasts it."""
        return bool(prefixed(self._store, self.group).check([ANNOUNCED_KEY]))

    def is_announced(self, bucket: int) -> bool:
        """Whether the trainer broadcasts this bucket of the current session; True if it announces none.

        Raises:
            WeightSyncError: the trainer's store is closed.
        """
        number = self.num_buckets + bucket
        if self.announces and number >= self._num_announced:
            if not self.connected:  # the store's `get` would print a stack trace
                raise WeightSyncError("its store is closed")
            self._num_announced = int(prefixed(self._store, self.group).get(ANNOUNCED_KEY))
        return not self.announces or number < self._num_announced

    def connect(self) -> None:
        """Build the communicator if the trainer builds its own before its first broadcast; blocks."""
        if (self.announces or self.registers) and not self._is_communicator_built:
            self._is_communicator_built = True
            self.process_group.eager_connect_single_device(self.device)  # type: ignore[attr-defined]

    @cached_property
    def registers(self) -> bool:
        """Whether flattened buckets must be received into registered buffers."""
        return bool(prefixed(self._store, self.group).check([REGISTERED_KEY]))

    def receive_buffer_cost(self, num_bytes: int) -> int:
        """Returns the bytes that two receive buffers of ``num_bytes`` in all will still take, at most."""
        if self.group.backend != "nccl":
            return num_bytes
        if any(2 * each.num_bytes >= num_bytes for each in self._registered):  # kept, and large enough
            return 0
        return round_up(num_bytes, GRANULARITY)

    def registered_buffers(self, num_bytes: int, count: int = 2) -> RegisteredBuffers:
        """Returns buffers of at least `num_bytes` each, to be registered; kept until the group has ended.

        Raises:
            WeightSyncError: the group is dead, or the device cannot register memory.
            torch.OutOfMemoryError: there is too little memory.
        """
        process_group = self.process_group
        for buffers in self._registered:
            if buffers.num_bytes >= num_bytes and len(buffers.buffers) >= count:
                return buffers
        if not can_register(process_group, self.device):
            raise WeightSyncError(
                f"the trainer sends from buffers that are registered with NCCL, and {self.device} cannot "
                "register buffers (it has no multicast memory): let the trainer send with flattened=False"
            )
        buffers = RegisteredBuffers(process_group, self.device, num_bytes, count)
        with self._lock:
            self._check()
            self._registered += (buffers,)
        return buffers

    def register(self, buffers: RegisteredBuffers) -> None:
        """Register `buffers` with the communicator, which must be connected.

        Raises:
            WeightSyncError: the group is dead.
        """
        with self._lock:  # nothing may be registered with an aborted communicator
            self._check()
            buffers.register()

    @property
    def is_receiving(self) -> bool:
        """Whether a `Receiver` uses the group; it checks for itself whether the trainer has gone."""
        return self._idle is not None and not self._idle.is_set()

    @property
    def process_group(self) -> ProcessGroup:
        """The process group for broadcasts from rank 0; an NCCL group is made at the first access.

        Raises:
            WeightSyncError: the group is dead.
        """
        if self._process_group is None and self.reason is None:
            # Without the lock, since it waits.
            made = make_backend(self._store, self.group, self.rank, FOREVER)
            with self._lock:
                self._process_group = made if self.reason is None else None
        process_group = self._process_group
        self._check()
        assert process_group is not None
        return process_group

    def mark_dead(self, reason: str) -> None:
        """Close the connections, which ends all waits on them here and at the trainer; returns at once."""
        with self._lock:
            if self.reason is not None:
                return
            self.reason = reason
            process_group, self._process_group = self._process_group, None
            registered, self._registered = self._registered, ()
        logger.info("the weight group %r is dead: %s", self.group.name, reason)
        closing = threading.Thread(
            target=self._close, args=(process_group, registered), name="break-weight-group", daemon=True
        )
        closing.start()
        self._closing = closing

    def set_receiver(self, threads: Sequence[threading.Thread], idle: threading.Event) -> None:
        """Set the threads that receive from the group; ``idle`` is set once they touch no memory any more."""
        self._threads, self._idle = threads, idle

    @property
    def is_closed(self) -> bool:
        """Whether all connections are closed, so that nothing can be received any more."""
        return self._closing is not None and not self._closing.is_alive()

    def wait_ended(self, timeout_s: float) -> None:
        """After `mark_dead`, wait until connections are closed and threads ended, unless those are stuck."""
        if self._closing is not None:
            self._closing.join(timeout_s)
        if self._idle is not None:
            self._idle.wait(timeout_s)
        for thread in self._threads:
            thread.join(_STUCK_S)

    def _check(self) -> None:
        """Raise if the group is dead."""
        if self.reason is not None:
            raise WeightSyncError(f"The group {self.group.name!r} is dead: {self.reason}. Join it again.")

    def _close(self, process_group: ProcessGroup | None, registered: tuple[RegisteredBuffers, ...]) -> None:
        """Close all connections; `registered` are kept alive until the communicator has ended."""
        if process_group is not None:
            close_backend(process_group, self.group, self.rank)
        if self._link is not None:
            self._link.close()


def prefixed(store: Store, group: Group) -> Store:
    """Returns the part of a store that belongs to a group, under the prefixes that torch gives it."""
    return PrefixStore(f"{group.name}/", PrefixStore(group.name, store))


def make_backend(store: Store, group: Group, rank: int, timeout: timedelta) -> ProcessGroup:
    """Returns the backend of a group, under the prefixes that torch gives to a group of that name.

    With gloo it waits for all other ranks. torch does not know the groups: trainer and engine may be in one
    process, and destroying its default group destroys all groups that torch knows.
    """
    part = prefixed(store, group)
    if group.backend == "gloo":
        gloo = dist.ProcessGroupGloo(PrefixStore("cpu/", part), rank, group.world_size, timeout)
        return cast(ProcessGroup, gloo)  # which torch's stubs do not say
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.group_name = group.name  # type: ignore[assignment]
    options.global_ranks_in_group = list(range(group.world_size))
    if part.check([MAX_CTAS_KEY]):
        options.config.max_ctas = int(part.get(MAX_CTAS_KEY))
    with _without_watchdog():
        nccl = dist.ProcessGroupNCCL(PrefixStore("cuda/", part), rank, group.world_size, options)
    return cast(ProcessGroup, nccl)


def close_backend(process_group: ProcessGroup, group: Group, rank: int) -> None:
    """Close all connections of a backend, which ends all waits on them; takes a moment."""
    if group.backend == "nccl":
        with suppress(Exception):
            process_group.abort()
        return
    # gloo has no abort, but a receive that times out closes all connections of its group.
    for peer in set(range(group.world_size)) - {rank}:
        # Always raised: by this timeout, or because the connection was closed before.
        with suppress(RuntimeError):
            process_group.recv([torch.empty(1)], peer, 0).wait(timedelta(milliseconds=1))


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Context in which NCCL groups are made without a watchdog, so that they cannot end the process."""
    with _environment:
        before = {name: os.environ.get(name) for name in _WITHOUT_WATCHDOG}
        os.environ.update(_WITHOUT_WATCHDOG)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
