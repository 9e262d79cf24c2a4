"""The process group that a trainer hosts, as its rank 0, beside whatever groups it has itself."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from segue.memory.nccl_buffers import RegisteredBuffers, can_register
from segue.weight_update.transport.group import ANNOUNCED_KEY, MAX_CTAS_KEY, REGISTERED_KEY, without_watchdog

MARGIN_S = 600.0  # torch's own deadlines lie so far behind ours
LEAVE_S = 10.0
STAND_IN_S = 1.0
CHECK_S = 0.1


class TrainerGroup:
    """Joining begins at once, in a thread of its own; :meth:`wait` for it before the first broadcast.

    Nobody else has to have joined for the constructor to return, and an engine whose communicator is built
    within its first receive holds up :meth:`wait` alone.
    """

    def __init__(
        self,
        *,
        name: str,
        address: str,
        port: int,
        world_size: int,
        device: torch.device,
        timeout_s: float,
        max_ctas: int | None = None,
    ) -> None:
        """``device``: of the tensors to be broadcast; a CUDA device means NCCL, any other one gloo.

        ``max_ctas``: of NCCL's kernels, here and in the engines.
        """
        self.name, self.address, self.port, self.world_size = name, address, port, world_size
        self.device = device
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        # The same for all broadcasts: memory that one stream gave back is no other stream's.
        self.streams = [torch.cuda.Stream(device) for _ in range(2)] if self.backend == "nccl" else []  # type: ignore[no-untyped-call]
        self._max_ctas = max_ctas
        self._store: Store | None = None  # the group's part of it, when it says all that engines are to know
        self._has_store = threading.Event()
        self._num_buckets = 0
        self._registers = False  # flattened buckets' memory
        self._timeout = timedelta(seconds=timeout_s + MARGIN_S)
        self._group: Any = None
        self._buffers: list[RegisteredBuffers] = []
        self._error: Exception | None = None
        self._left = False
        self._lock = threading.Lock()
        self._joining = threading.Thread(target=self._join, name="join-weight-group", daemon=True)
        self._joining.start()

    def wait(self, timeout_s: float, check: Callable[[], None]) -> None:
        """Return once all have joined; ``check`` is called now and then, and may raise.

        Raises:
            TimeoutError: they have not.
            RuntimeError: torch says why they cannot.
        """
        deadline = time.monotonic() + timeout_s
        while self._joining.is_alive() and time.monotonic() < deadline:
            check()
            self._joining.join(CHECK_S)
        if self._error is not None:
            shared = "Duplicate GPU" in str(self._error)
            hint = "; NCCL cannot join two processes on one GPU: use backend='gloo'" if shared else ""
            raise RuntimeError(
                f"the group {self.name!r} was not joined: {self._error}{hint}"
            ) from self._error
        if self._group is None:
            raise TimeoutError(f"not all engines joined the group {self.name!r} within {timeout_s:g} s")

    def wait_met(self, timeout_s: float) -> None:
        """Return when all have met and the store holds what engines are to know; :meth:`wait` says if not."""
        deadline = time.monotonic() + timeout_s
        while self._joining.is_alive() and time.monotonic() < deadline and not self._has_store.is_set():
            self._has_store.wait(CHECK_S)

    def announce(self) -> None:
        """Say that a bucket is about to be broadcast; with NCCL, before each."""
        store = self._store
        self._check()
        assert store is not None
        self._num_buckets += 1
        store.set(ANNOUNCED_KEY, str(self._num_buckets))

    def buffers(self, num_bytes: int, count: int) -> list[Tensor]:
        """``count`` of at least so many bytes, for flattened buckets.

        Where they are registered they are the same each time, and kept for as long as the group.

        Raises:
            RuntimeError: the group was left.
            torch.OutOfMemoryError: there is too little memory.
        """
        if not self._registers:
            return [torch.empty(num_bytes, dtype=torch.uint8, device=self.device) for _ in range(count)]
        for kept in self._buffers:
            if kept.num_bytes >= num_bytes and len(kept.buffers) >= count:
                return kept.buffers
        group = self._group
        self._check()
        made = RegisteredBuffers(group._get_backend(self.device), self.device, num_bytes, count)
        with self._lock:  # a communicator that was aborted must not be told
            self._check()
            made.register()
            self._buffers.append(made)
        return made.buffers

    def broadcast(self, tensor: Tensor) -> Any:
        """Begin to send a contiguous tensor of :attr:`device`.

        With NCCL it is queued on the current stream; with gloo, ``wait()`` for what is returned.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.asyncOp = False
        return self._group.broadcast([tensor], options)

    def leave(self) -> None:
        """Close the store and all connections, whatever is still going on; the port is free soon after.

        What cannot be ended is abandoned with its thread.
        """
        with self._lock:
            if self._left:
                return
            self._left = True
            group, self._group = self._group, None
            buffers, self._buffers = self._buffers, []
            self._store = None
        work = threading.Thread(
            target=self._end, args=(group, buffers), name="leave-weight-group", daemon=True
        )
        work.start()
        work.join(LEAVE_S)

    def _join(self) -> None:
        try:
            where = f"tcp://{bracketed(self.address)}:{self.port}"
            store, _, _ = next(rendezvous(where, rank=0, world_size=self.world_size, timeout=self._timeout))
            if self._left:  # and `_end` stands in for those who are missing
                return
            store.set_timeout(self._timeout)
            group = self._make(PrefixStore(self.name, store))
        except Exception as error:
            self._error, self._store = error, None
            return
        with self._lock:
            if not self._left:
                self._group = group
                return
            self._store = None
        _destroy(group)

    def _make(self, store: Store) -> Any:
        options: Any = None
        ours = PrefixStore(f"{self.name}/", store)
        if self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            self._store = ours
            ours.set(ANNOUNCED_KEY, "0")
            if self._max_ctas is not None:
                options.config.max_ctas = self._max_ctas
                ours.set(MAX_CTAS_KEY, str(self._max_ctas))
        with without_watchdog() if options is not None else nullcontext(), _without_bound_device():
            group, _ = c10d._new_process_group_helper(
                self.world_size,
                0,
                [],
                dist.Backend(self.backend),
                store,
                group_name=self.name,  # type: ignore[arg-type]
                backend_options=options,
                timeout=self._timeout,
            )
        if options is not None:
            nccl = group._get_backend(self.device)
            self._registers = can_register(nccl, self.device)
            if self._registers:
                ours.set(REGISTERED_KEY, "1")
        self._has_store.set()
        if options is not None:  # at once: no broadcast waits for a communicator to be built
            nccl.eager_connect_single_device(self.device)
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(self.world_size)}
        return group

    def _check(self) -> None:
        if self._left:
            raise RuntimeError(f"the group {self.name!r} was left")

    def _end(self, group: Any, buffers: list[RegisteredBuffers]) -> None:
        """`buffers` are only held as long as the communicator knows them."""
        if group is not None:
            if self.backend == "nccl":
                group.abort()
            _destroy(group)
        elif self._joining.is_alive():
            # The rendezvous waits for a number of clients and cannot be cancelled; so we are those clients.
            # A try is short: the store may close in the middle of it.
            deadline = time.monotonic() + LEAVE_S
            while self._joining.is_alive() and time.monotonic() < deadline:
                with suppress(RuntimeError):
                    TCPStore(self.address, self.port, self.world_size, False, timedelta(seconds=STAND_IN_S))


def free_port(wanted: int | None) -> int:
    """``wanted`` if nothing listens there, else any free port."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    for port in (wanted or 0, 0):
        with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does
            with suppress(OSError):
                probe.bind(("", port))
                return int(probe.getsockname()[1])
    raise OSError("no free port")


def own_address(host: str, port: int) -> str:
    """The address under which ``host`` reaches this machine, one of IPv4 if there is one."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    family, kind, _, _, target = min(found, key=lambda each: each[0] != socket.AF_INET)
    with closing(socket.socket(family, kind)) as probe:
        probe.connect(target)  # sends nothing
        return str(probe.getsockname()[0])


def bracketed(address: str) -> str:
    """As it stands in a URL."""
    return f"[{address}]" if ":" in address else address


def _destroy(group: Any) -> None:
    # What torch says about a group that failed helps nobody: it is given up.
    with suppress(Exception):
        dist.destroy_process_group(group)


@contextmanager
def _without_bound_device() -> Iterator[None]:
    """A default group that is bound to a device is split by torch for every new group, with all its ranks.

    Ours is joined by one of them alone.
    """
    default = c10d._get_default_group() if dist.is_initialized() else None
    if default is None or default.bound_device_id is None:
        yield
        return
    device, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = device
