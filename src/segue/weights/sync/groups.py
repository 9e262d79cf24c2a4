"""The process groups that trainers host, as one rank of an engine joins them.

They are met as SGLang's and OpenRLHF's ``init_custom_process_group`` meets them: a TCP store of rank 0,
then a backend under the prefixes that torch's ``_new_process_group_helper`` gives to a group of that name.
They are not registered with torch: a trainer in the same process may have a group of this name, and ends all
those that torch knows when it destroys its default one.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store
from torch.distributed.rendezvous import rendezvous

from segue.errors import WeightSyncError
from segue.logs import logger
from segue.protocol.weights import Group

# Of stores and operations: longer than any session lives. Deadlines are kept by whoever waits.
FOREVER = timedelta(days=1)
# A trainer that limits its communicator's CTAs writes their number under this key into the group's store:
# ranks with different numbers build different channels, and hang.
MAX_CTAS_KEY = "max_ctas"
# Buckets that the trainer has begun to broadcast since the group was made, if it says so: then the key is
# there before an engine is told to receive.
ANNOUNCED_KEY = "announced"
# Read when an NCCL group is made. Without the watchdog nothing ends the process on an error or a time-out.
_WITHOUT_WATCHDOG = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
_CONNECT_RETRY_S = 0.1
_CLOSE_S = 5.0
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
        return bool(_prefixed(self._store, self.group).check([ANNOUNCED_KEY]))

    def is_announced(self, bucket: int) -> bool:
        """Whether this bucket of the session that is received is being broadcast; True if no word will come.

        Raises:
            WeightSyncError: the trainer's store is gone.
        """
        number = self.num_buckets + bucket
        if self.announces and number >= self._num_announced:
            if not self.connected:  # torch would print a stack trace
                raise WeightSyncError("its store is closed")
            self._num_announced = int(_prefixed(self._store, self.group).get(ANNOUNCED_KEY))
        return not self.announces or number < self._num_announced

    def connect(self) -> None:
        """Build the communicator if the trainer does not wait for a broadcast to build its own; blocks."""
        if self.announces and not self._is_connected:
            self._is_connected = True
            self.process_group.eager_connect_single_device(self.device)  # type: ignore[attr-defined]

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
        if process_group is None:
            raise WeightSyncError(f"The group {self.group.name!r} is dead: {self.reason}. Join it again.")
        return process_group

    def mark_dead(self, reason: str) -> None:
        """Close its connections and so end what waits for them here and at the trainer; returns at once."""
        with self._lock:
            if self.reason is not None:
                return
            self.reason = reason
            process_group, self._process_group = self._process_group, None
        logger.info("the weight group %r is dead: %s", self.group.name, reason)
        breaking = threading.Thread(
            target=self._break, args=(process_group,), name="break-weight-group", daemon=True
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

    def _break(self, process_group: ProcessGroup | None) -> None:
        if process_group is not None and self.group.backend == "nccl":
            with suppress(Exception):
                process_group.abort()
        elif process_group is not None:
            # gloo has no abort, but a receive that runs out of time closes all connections of its group.
            for peer in set(range(self.group.world_size)) - {self.rank}:
                with suppress(RuntimeError):  # always: this one is closed now, if it was not before
                    process_group.recv([torch.empty(1)], peer, 0).wait(timedelta(milliseconds=1))
        self._link.close()


@dataclass(slots=True)
class _Attempt:
    group: Group
    ended: threading.Event = field(default_factory=threading.Event)
    error: str | None = None
    abandoned: bool = False  # its thread goes on until it can end, and what it makes is not kept


class Groups:
    """The groups of one rank, by name. Any thread may call any method."""

    def __init__(self, device: torch.device) -> None:
        """``device``: the rank's own; NCCL needs a CUDA device."""
        self._device = device
        self._lock = threading.Lock()
        self._joined: dict[str, JoinedGroup] = {}
        self._attempts: dict[str, _Attempt] = {}

    def get(self, name: str) -> JoinedGroup | None:
        """The group that was joined under this name, dead or alive."""
        with self._lock:
            return self._joined.get(name)

    def drop_dead(self) -> list[str]:
        """Forget the groups that are dead or whose trainer has gone; their names."""
        with self._lock:
            dead = [name for name, each in self._joined.items() if not each.is_receiving and not each.alive]
            for name in dead:
                del self._joined[name]
        return dead

    def join(self, group: Group, tp_rank: int, timeout_s: float) -> bool:
        """Meet the trainer in ``group``, as rank ``group.rank_offset + tp_rank``; blocks.

        A group that is alive and was joined with the same parameters is kept (False), else made (True), and
        a dead one replaced. An attempt with other parameters that has not met anybody yet is given up. What
        cannot be cancelled is abandoned with a thread of its own.

        Raises:
            WeightSyncError: nobody met, parameters that cannot work, or a live group with others.
        """
        rank = group.rank_offset + tp_rank
        _check(group, rank, self._device)
        with self._lock:
            known = self._joined.get(group.name)
            if known is not None and known.alive:
                if known.group == group:
                    return False
                raise WeightSyncError(
                    f"The group {group.name!r} is joined already, with other parameters "
                    f"({_words(known.group)}; asked for: {_words(group)}): destroy it first, or take another "
                    "group_name.",
                    param="group_name",
                )
            attempt = self._attempts.get(group.name)
            if attempt is not None and attempt.group != group:
                self._give_up(attempt, _superseded(attempt.group, group))
                attempt = None
            if attempt is None:
                attempt = self._attempts[group.name] = _Attempt(group)
                threading.Thread(
                    target=self._try,
                    args=(attempt, rank, timeout_s),
                    name="join-weight-group",
                    daemon=True,
                ).start()
        if not attempt.ended.wait(timeout_s):
            with self._lock:
                if not attempt.ended.is_set():
                    self._give_up(attempt, _unmet(group, timeout_s))
        if attempt.error is not None:
            raise WeightSyncError(attempt.error)
        return True

    def leave(self, name: str) -> None:
        """Close a group's connections and forget it.

        Raises:
            WeightSyncError: there is none of this name.
        """
        with self._lock:
            joined = self._joined.pop(name, None)
            names = sorted(self._joined)
        if joined is None:
            raise WeightSyncError(f"There is no group {name!r}; groups joined: {names}.", param="group_name")
        joined.mark_dead("it was left")

    def close(self) -> None:
        """Leave all groups, and abandon those that are being joined."""
        with self._lock:
            joined, self._joined = list(self._joined.values()), {}
            for attempt in list(self._attempts.values()):
                self._give_up(attempt, "the engine ends")
        for group in joined:
            group.mark_dead("the engine ends")
        for group in joined:  # a thread that is in torch when the interpreter ends takes the process with it
            group.wait_ended(_CLOSE_S)

    def _give_up(self, attempt: _Attempt, error: str) -> None:
        """End the wait for an attempt; the lock is held."""
        attempt.abandoned, attempt.error = True, error
        del self._attempts[attempt.group.name]
        attempt.ended.set()

    def _try(self, attempt: _Attempt, rank: int, timeout_s: float) -> None:
        group = attempt.group
        joined: JoinedGroup | None = None
        error: str | None = None
        deadline = time.monotonic() + timeout_s
        try:
            joined = _meet(attempt, rank, self._device, deadline)
        except TimeoutError:
            error = _unmet(group, timeout_s)
        except Exception as failure:
            timed_out = time.monotonic() >= deadline
            error = _unmet(group, timeout_s) if timed_out else _failed(group, failure)
        with self._lock:
            old = None
            if not attempt.abandoned:
                if joined is not None:
                    old = self._joined.get(group.name)
                    self._joined[group.name] = joined
                attempt.error = error
                del self._attempts[group.name]
                attempt.ended.set()
        if old is not None:
            old.mark_dead("it was joined anew")
        if joined is not None and attempt.abandoned:
            joined.mark_dead("nobody waits for it any more")


def _check(group: Group, rank: int, device: torch.device) -> None:
    if not 0 < rank < group.world_size:
        raise WeightSyncError(
            f"rank_offset {group.rank_offset} gives rank {rank} of world_size {group.world_size}; "
            "ranks count from 0, the trainer's, and world_size is 1 + the ranks of all engines.",
            param="rank_offset",
        )
    if not 0 < group.master_port < 1 << 16:
        raise WeightSyncError(f"master_port {group.master_port} is not in 1..65535.", param="master_port")
    if group.backend == "nccl" and device.type != "cuda":
        raise WeightSyncError(
            f"backend 'nccl' needs an engine on CUDA, and this one is on {device.type!r}: use 'gloo'.",
            param="backend",
        )


def _meet(attempt: _Attempt, rank: int, device: torch.device, deadline: float) -> JoinedGroup:
    group = attempt.group
    link = _connect(attempt, deadline)
    try:
        address = f"[{group.master_address}]" if ":" in group.master_address else group.master_address
        store, _, _ = next(
            rendezvous(
                f"tcp://{address}:{group.master_port}",
                rank=rank,
                world_size=group.world_size,
                timeout=_remaining(deadline),
            )
        )
        process_group: ProcessGroup | None = None
        if group.backend == "gloo":
            prefixed = PrefixStore("cpu/", _prefixed(store, group))
            gloo = dist.ProcessGroupGloo(prefixed, rank, group.world_size, _remaining(deadline))
            gloo.set_timeout(FOREVER)
            process_group = cast(ProcessGroup, gloo)  # it has its methods, though torch's stubs do not say so
        store.set_timeout(FOREVER)
        return JoinedGroup(group, rank, device, store, link, process_group)
    except BaseException:
        link.close()
        raise


def _connect(attempt: _Attempt, deadline: float) -> socket.socket:
    # torch would wait for somebody to listen too, but with a stack trace on standard error at each try.
    where = (attempt.group.master_address, attempt.group.master_port)
    while True:
        try:
            link = socket.create_connection(where, timeout=_remaining(deadline).total_seconds())
            break
        except socket.gaierror as error:
            raise WeightSyncError(f"master_address {where[0]!r} is no address: {error}.") from error
        except OSError:
            if attempt.abandoned or time.monotonic() + _CONNECT_RETRY_S >= deadline:
                raise TimeoutError from None
            time.sleep(_CONNECT_RETRY_S)
    link.setblocking(False)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host that vanishes says nothing
    for option, seconds in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        link.setsockopt(socket.IPPROTO_TCP, option, seconds)
    return link


def _prefixed(store: Store, group: Group) -> Store:
    return PrefixStore(f"{group.name}/", PrefixStore(group.name, store))


def _nccl(store: Store, group: Group, rank: int) -> ProcessGroup:
    prefixed = _prefixed(store, group)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = FOREVER
    options.group_name = group.name  # type: ignore[assignment]
    options.global_ranks_in_group = list(range(group.world_size))
    if prefixed.check([MAX_CTAS_KEY]):
        options.config.max_ctas = int(prefixed.get(MAX_CTAS_KEY))
    with without_watchdog():
        nccl = dist.ProcessGroupNCCL(PrefixStore("cuda/", prefixed), rank, group.world_size, options)
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


def _remaining(deadline: float) -> timedelta:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return timedelta(seconds=seconds)


def _words(group: Group) -> str:
    return (
        f"{group.master_address}:{group.master_port}, rank_offset {group.rank_offset}, "
        f"world_size {group.world_size}, {group.backend}"
    )


def _unmet(group: Group, timeout_s: float) -> str:
    return (
        f"The group {group.name!r} ({_words(group)}) was not met within {timeout_s:g} s: its trainer "
        "must listen there, and all ranks must join with the same name, world_size and backend. Retry then."
    )


def _superseded(group: Group, other: Group) -> str:
    return (
        f"Joining the group {group.name!r} ({_words(group)}) was given up: nobody was met there, and it was "
        f"asked for with other parameters ({_words(other)}). Retry with those, or take another group_name."
    )


def _failed(group: Group, error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return f"The group {group.name!r} ({_words(group)}) cannot be joined: {text}. Retry when that is mended."
