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
from torch._C._distributed_c10d import ProcessGroup, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from segue.memory.nccl_buffers import RegisteredBuffers, can_register
from segue.messages.weight_operations import Backend, Group
from segue.weight_update.transport.base import broadcast_options
from segue.weight_update.transport.group import (
    ANNOUNCED_KEY,
    MAX_CTAS_KEY,
    REGISTERED_KEY,
    close_backend,
    make_backend,
    prefixed,
)
from segue.weight_update.transport.rendezvous import bracketed

MARGIN_S = 600.0  # torch's own deadlines are later than ours by so much
LEAVE_S = 10.0
STAND_IN_S = 1.0  # per connection that stands in for missing engines, see `TrainerGroup._end`
CHECK_S = 0.1


@dataclass(eq=False, kw_only=True)
class TrainerGroup:
    """A process group with this trainer as rank 0; call :meth:`wait` before the first broadcast.

    The constructor joins in a thread of its own and returns at once. An engine that builds its communicator
    only in its first receive delays :meth:`wait` alone.
    """

    name: str
    address: str
    port: int
    world_size: int
    device: torch.device  # of the tensors to broadcast; a CUDA device means NCCL, any other device gloo
    timeout_s: float
    max_ctas: int | None = None  # the limit of NCCL's CTAs, here and in the engines; None: NCCL's default

    def __post_init__(self) -> None:
        self.backend: Backend = "nccl" if self.device.type == "cuda" else "gloo"
        # All broadcasts share these streams: torch reuses freed memory for the stream that allocated it only.
        self.streams = [torch.cuda.Stream(self.device) for _ in range(2)] if self.backend == "nccl" else []  # type: ignore[no-untyped-call]
        self._store: Store | None = None  # the group's part of the store, with NCCL
        self._has_store = threading.Event()  # set once the store has all keys that engines read
        self._num_buckets = 0  # announced so far
        self._registers = False  # whether the memory of flattened buckets is registered with NCCL
        self._timeout = timedelta(seconds=self.timeout_s + MARGIN_S)
        self._group = Group(
            name=self.name,
            master_address=self.address,
            master_port=self.port,
            rank_offset=0,
            world_size=self.world_size,
            backend=self.backend,
        )
        self._process_group: ProcessGroup | None = None
        self._buffers: list[RegisteredBuffers] = []
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
        if self._error is not None:
            shared = "Duplicate GPU" in str(self._error)
            hint = "; NCCL cannot connect two processes on one GPU: use backend='gloo'" if shared else ""
            raise RuntimeError(
                f"the group {self.name!r} was not joined: {self._error}{hint}"
            ) from self._error
        if self._process_group is None:
            raise TimeoutError(f"not all engines joined the group {self.name!r} within {timeout_s:g} s")

    def wait_met(self, timeout_s: float) -> None:
        """Wait until all ranks are in the store and it has all keys that engines read; raises no errors.

        :meth:`wait` reports a failure.
        """
        deadline = time.monotonic() + timeout_s
        while self._joining.is_alive() and time.monotonic() < deadline and not self._has_store.is_set():
            self._has_store.wait(CHECK_S)

    def announce(self) -> None:
        """Announce the next bucket in the store; with NCCL, to be called before each bucket."""
        store = self._store
        self._check()
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
        for kept in self._buffers:
            if kept.num_bytes >= num_bytes and len(kept.buffers) >= count:
                return kept.buffers
        nccl = self._process_group
        self._check()
        made = RegisteredBuffers(nccl, self.device, num_bytes, count)
        with self._lock:  # nothing may be registered with an aborted communicator
            self._check()
            made.register()
            self._buffers.append(made)
        return made.buffers

    def broadcast(self, tensor: Tensor) -> Any:
        """Begin to broadcast a contiguous tensor on :attr:`device`.

        With NCCL the broadcast is queued on the current stream; with gloo, call ``wait()`` of the result.
        """
        assert self._process_group is not None
        return self._process_group.broadcast([tensor], broadcast_options())

    def leave(self) -> None:
        """Close the store and all connections, even during a broadcast; the port is free soon after.

        Takes at most `LEAVE_S`; operations that cannot be ended are left behind with their thread.
        """
        with self._lock:
            if self._left:
                return
            self._left = True
            made, self._process_group = self._process_group, None
            buffers, self._buffers = self._buffers, []
            self._store = None
        work = threading.Thread(
            target=self._end, args=(made, buffers), name="leave-weight-group", daemon=True
        )
        work.start()
        work.join(LEAVE_S)

    def _join(self) -> None:
        try:
            where = f"tcp://{bracketed(self.address)}:{self.port}"
            store, _, _ = next(rendezvous(where, rank=0, world_size=self.world_size, timeout=self._timeout))
            if self._left:  # `_end` has connected in place of the missing engines
                return
            store.set_timeout(self._timeout)
            made = self._make(store)
        except Exception as error:
            self._error, self._store = error, None
            return
        with self._lock:
            if not self._left:
                self._process_group = made
                return
            self._store = None
        close_backend(made, self._group, 0)

    def _make(self, store: Store) -> ProcessGroup:
        if self.backend == "gloo":
            self._has_store.set()
            return make_backend(store, self._group, 0, self._timeout)
        self._store = ours = prefixed(store, self._group)
        ours.set(ANNOUNCED_KEY, "0")
        if self.max_ctas is not None:
            ours.set(MAX_CTAS_KEY, str(self.max_ctas))
        nccl = make_backend(store, self._group, 0, self._timeout)
        self._registers = can_register(nccl, self.device)
        if self._registers:
            ours.set(REGISTERED_KEY, "1")
        self._has_store.set()
        # Build the communicator now, so that no broadcast waits for it.
        nccl.eager_connect_single_device(self.device)  # type: ignore[attr-defined]
        return nccl

    def _check(self) -> None:
        if self._left:
            raise RuntimeError(f"the group {self.name!r} was left")

    def _end(self, made: ProcessGroup | None, buffers: list[RegisteredBuffers]) -> None:
        """End the group or the rendezvous; `buffers` are kept alive until the communicator has ended."""
        if made is not None:
            close_backend(made, self._group, 0)
        elif self._joining.is_alive():
            # The rendezvous waits for a number of clients and cannot be cancelled, so this thread connects in
            # place of the missing ones. Each try is short: the store may close in the middle of it.
            deadline = time.monotonic() + LEAVE_S
            while self._joining.is_alive() and time.monotonic() < deadline:
                with suppress(RuntimeError):
                    TCPStore(self.address, self.port, self.world_size, False, timedelta(seconds=STAND_IN_S))


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
