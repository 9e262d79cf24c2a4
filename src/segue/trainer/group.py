"""The process group that a trainer hosts as rank 0, in addition to any groups of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from segue.memory.nccl_buffers import can_register
from segue.messages.weight_operations import Group
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
            shared = "Duplicate GPU" in str(self._error)
            hint = "; NCCL cannot connect two processes on one GPU: use backend='gloo'" if shared else ""
            raise RuntimeError(f"the group {name!r} was not joined: {self._error}{hint}") from self._error
        if self._joined is None:
            raise TimeoutError(f"not all engines joined the group {name!r} within {timeout_s:g} s")

    def announce(self) -> None:
        """Announce the next bucket in the store; with NCCL, to be called before each bucket."""
        store = self._store
        self._alive()
        assert store is not None
        self._num_buckets += 1
        store.set(ANNOUNCED_KEY, str(self._num_buckets))

    def buffers(self, num_bytes: int, count: int) -> list[Tensor]:
        """Returns ``count`` buffers of at least ``num_bytes`` bytes each, for flattened buckets.

        Registered buffers are kept and reused for as long as the group exists.

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
                TCPStore(group.master_address, group.master_port, group.world_size, False, timeout)

    def _join(self) -> None:
        group = self.group
        try:
            # torch's `rendezvous` hosts no store in a process that torchrun has started.
            host, port, timeout = group.master_address, group.master_port, self._timeout
            store = TCPStore(host, port, group.world_size, True, timeout, multi_tenant=True)
            if self._left:  # `leave` has connected in place of the missing engines
                return
            joined = self._make(store)
        except Exception as error:
            self._error, self._store = error, None
            self.has_met.set()
            return
        with self._lock:
            if not self._left:
                self._joined = joined
                return
            self._store = None
        joined.mark_dead("it was left")

    def _make(self, store: Store) -> JoinedGroup:
        self._store = ours = prefixed(store, self.group)
        if self.group.backend == "gloo":
            self.has_met.set()
            made = make_backend(store, self.group, 0, self._timeout)
        else:
            ours.set(ANNOUNCED_KEY, "0")
            if self.max_ctas is not None:
                ours.set(MAX_CTAS_KEY, str(self.max_ctas))
            made = make_backend(store, self.group, 0, self._timeout)
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


def free_port(wanted: int | None) -> int:
    """Returns ``wanted`` if no process listens there, else any free port."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    for port in (wanted or 0, 0):
        with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does
            with suppress(OSError):
                probe.bind(("", port))
                return int(probe.getsockname()[1])
    raise OSError("no free port")


def own_address(host: str, port: int) -> str:
    """Returns the address at which ``host`` can reach this machine, an IPv4 one if possible."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    family, kind, _, _, target = min(found, key=lambda each: each[0] != socket.AF_INET)
    with closing(socket.socket(family, kind)) as probe:
        probe.connect(target)  # sends nothing
        return str(probe.getsockname()[0])
