"""A group that was joined: whether it lives, what its trainer says in the store, and its communicator."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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

# Of stores and operations: longer than any session lives. Deadlines are kept by whoever waits.
FOREVER = timedelta(days=1)
# A trainer that limits its communicator's CTAs writes their number under this key into the group's store:
# ranks with different numbers build different channels, and hang.
MAX_CTAS_KEY = "max_ctas"
# Buckets that the trainer has begun to broadcast since the group was made, if it says so: then the key is
# there before an engine is told to receive.
ANNOUNCED_KEY = "announced"
# A trainer that sends flattened buckets from buffers that it has registered with NCCL writes this key before
# an engine is told to receive: NCCL wants all ranks of a communicator to do so, or none.
REGISTERED_KEY = "registered"
# Read when an NCCL group is made. Without the watchdog nothing ends the process on an error or a time-out.
_WITHOUT_WATCHDOG = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
_STUCK_S = 0.2  # a thread that has not ended then will not
_environment = threading.Lock()


class JoinedGroup:
    """A group that was joined, until it is marked dead."""

    def __init__(
        self,
        group: Group,
        rank: int,
        engine_device: torch.device,
        store: Store,
        link: socket.socket,
        process_group: ProcessGroup | None,
    ) -> None:
        """``link``: a connection to the trainer's store that says nothing; closed when the trainer ends.

        An NCCL group is made when it is first used: see `MAX_CTAS_KEY`.
        """
        self.group = group
        self.rank = rank
        self.engine_device = engine_device
        self.device = engine_device if group.backend == "nccl" else torch.device("cpu")  # of what is received
        self.reason: str | None = None  # why it is dead
        self.num_buckets = 0  # of the sessions that were received
        self._num_announced = 0  # buckets known to be
        self._is_connected = False
        self._landing: tuple[RegisteredBuffers, ...] = ()
        self._store = store
        self._link = link
        self._process_group = process_group
        self._lock = threading.Lock()
        self._breaking: threading.Thread | None = None
        self._threads: Sequence[threading.Thread] = ()
        self._quiet = threading.Event()
        self._quiet.set()

    @property
    def alive(self) -> bool:
        """Whether the trainer's store is there and nothing has failed so far."""
        if self.reason is None and not self.connected:
            self.mark_dead("its trainer has gone")
        return self.reason is None

    @property
    def connected(self) -> bool:
        """Whether the trainer's store is there."""
        try:
            return self._link.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    @property
    def peer(self) -> tuple[str, int] | None:
        """The address of the trainer's store; None once it has gone."""
        try:
            return cast(tuple[str, int], self._link.getpeername()[:2])
        except OSError:
            return None

    @cached_property
    def streams(self) -> tuple[torch.Stream, torch.Stream]:
        """Of the engine's CUDA device: one for what comes, one for copies of it.

        torch hands out 32 streams in turn and begins again. These are the same for all sessions of a group,
        and of another priority than the one of the steps: else a receive would come to be queued there.
        """
        return torch.Stream(self.engine_device), torch.Stream(self.engine_device)

    @cached_property
    def announces(self) -> bool:
        """Whether the trainer announces the buckets that it begins to broadcast."""
        return bool(prefixed(self._store, self.group).check([ANNOUNCED_KEY]))

    def is_announced(self, bucket: int) -> bool:
        """Whether this bucket of the session that is received is being broadcast; True if no word will come.

        Raises:
            WeightSyncError: the trainer's store is gone.
        """
        number = self.num_buckets + bucket
        if self.announces and number >= self._num_announced:
            if not self.connected:  # torch would print a stack trace
                raise WeightSyncError("its store is closed")
            self._num_announced = int(prefixed(self._store, self.group).get(ANNOUNCED_KEY))
        return not self.announces or number < self._num_announced

    def connect(self) -> None:
        """Build the communicator if the trainer does not wait for a broadcast to build its own; blocks."""
        if (self.announces or self.registers) and not self._is_connected:
            self._is_connected = True
            self.process_group.eager_connect_single_device(self.device)  # type: ignore[attr-defined]

    @cached_property
    def registers(self) -> bool:
        """Whether flattened buckets are to land in registered buffers."""
        return bool(prefixed(self._store, self.group).check([REGISTERED_KEY]))

    def receive_buffer_cost(self, num_bytes: int) -> int:
        """Bytes that a session of flattened buckets takes at most, whose two buffers have so many."""
        if self.group.backend != "nccl":
            return num_bytes
        if any(2 * each.num_bytes >= num_bytes for each in self._landing):
            return 0
        return -(-num_bytes // GRANULARITY) * GRANULARITY

    def receive_buffer(self, num_bytes: int) -> RegisteredBuffers:
        """Two buffers of at least `num_bytes` each, to be registered; kept until the group has ended.

        Raises:
            WeightSyncError: the group is dead, or the device has no such memory.
            torch.OutOfMemoryError: there is too little memory.
        """
        process_group = self.process_group
        for receive_buffer in self._landing:
            if receive_buffer.num_bytes >= num_bytes:
                return receive_buffer
        if not can_register(process_group, self.device):
            raise WeightSyncError(
                f"the trainer sends from buffers that are registered with NCCL, and {self.device} has no "
                "memory that could be (it cannot multicast): let the trainer send with flattened=False"
            )
        receive_buffer = RegisteredBuffers(process_group, self.device, num_bytes, 2)
        with self._lock:
            self._check()
            self._landing += (receive_buffer,)
        return receive_buffer

    def register(self, receive_buffer: RegisteredBuffers) -> None:
        """Tell the communicator, which has to be connected, of `receive_buffer`.

        Raises:
            WeightSyncError: the group is dead.
        """
        with self._lock:  # an aborted one must not be told
            self._check()
            receive_buffer.register()

    @property
    def is_receiving(self) -> bool:
        """Whether a receiver is at it, who looks after the trainer on its own."""
        return not self._quiet.is_set()

    @property
    def process_group(self) -> ProcessGroup:
        """For broadcasts from rank 0.

        Raises:
            WeightSyncError: the group is dead.
        """
        if self._process_group is None and self.reason is None:
            made = _nccl(self._store, self.group, self.rank)  # the lock is never held while anything waits
            with self._lock:
                self._process_group = made if self.reason is None else None
        process_group = self._process_group
        self._check()
        assert process_group is not None
        return process_group

    def mark_dead(self, reason: str) -> None:
        """Close its connections and so end what waits for them here and at the trainer; returns at once."""
        with self._lock:
            if self.reason is not None:
                return
            self.reason = reason
            process_group, self._process_group = self._process_group, None
            receive_buffer, self._landing = self._landing, ()
        logger.info("the weight group %r is dead: %s", self.group.name, reason)
        breaking = threading.Thread(
            target=self._break, args=(process_group, receive_buffer), name="break-weight-group", daemon=True
        )
        breaking.start()
        self._breaking = breaking

    def used_by(self, threads: Sequence[threading.Thread], quiet: threading.Event) -> None:
        """Name the threads that receive from here; those that are stuck do nothing after ``quiet``."""
        self._threads, self._quiet = threads, quiet

    @property
    def is_broken(self) -> bool:
        """Whether nothing can come from it any more: all its connections are closed."""
        return self._breaking is not None and not self._breaking.is_alive()

    def wait_ended(self, timeout_s: float) -> None:
        """After `mark_dead`: wait until its connections are closed and its threads have ended, or sleep."""
        if self._breaking is not None:
            self._breaking.join(timeout_s)
        self._quiet.wait(timeout_s)
        for thread in self._threads:
            thread.join(_STUCK_S)

    def _check(self) -> None:
        if self.reason is not None:
            raise WeightSyncError(f"The group {self.group.name!r} is dead: {self.reason}. Join it again.")

    def _break(
        self, process_group: ProcessGroup | None, receive_buffer: tuple[RegisteredBuffers, ...]
    ) -> None:
        """`receive_buffer` is only held as long as the communicator may know it."""
        if process_group is not None and self.group.backend == "nccl":
            with suppress(Exception):
                process_group.abort()
        elif process_group is not None:
            # gloo has no abort, but a receive that runs out of time closes all connections of its group.
            for peer in set(range(self.group.world_size)) - {self.rank}:
                with suppress(RuntimeError):  # always: this one is closed now, if it was not before
                    process_group.recv([torch.empty(1)], peer, 0).wait(timedelta(milliseconds=1))
        self._link.close()


def prefixed(store: Store, group: Group) -> Store:
    """The part of a store that belongs to a group, as torch names it."""
    return PrefixStore(f"{group.name}/", PrefixStore(group.name, store))


def _nccl(store: Store, group: Group, rank: int) -> ProcessGroup:
    part = prefixed(store, group)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = FOREVER
    options.group_name = group.name  # type: ignore[assignment]
    options.global_ranks_in_group = list(range(group.world_size))
    if part.check([MAX_CTAS_KEY]):
        options.config.max_ctas = int(part.get(MAX_CTAS_KEY))
    with without_watchdog():
        nccl = dist.ProcessGroupNCCL(PrefixStore("cuda/", part), rank, group.world_size, options)
    return cast(ProcessGroup, nccl)


@contextmanager
def without_watchdog() -> Iterator[None]:
    """NCCL groups that are made within cannot end the process."""
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
