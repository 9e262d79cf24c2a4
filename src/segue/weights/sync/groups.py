"""The process groups that trainers host, as one rank of an engine joins them.

They are met as SGLang's and OpenRLHF's ``init_custom_process_group`` meets them: a TCP store of rank 0,
then a backend under the prefixes that torch's ``_new_process_group_helper`` gives to a group of that name.
They are not registered with torch: a trainer in the same process may have a group of this name, and ends all
those that torch knows when it destroys its default one.
"""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroup
from torch.distributed.rendezvous import rendezvous

from segue.errors import WeightSyncError
from segue.protocol.weights import Group
from segue.weights.sync.joined import FOREVER, JoinedGroup, prefixed

_CONNECT_RETRY_S = 0.1
_CLOSE_S = 5.0


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
            part = PrefixStore("cpu/", prefixed(store, group))
            gloo = dist.ProcessGroupGloo(part, rank, group.world_size, _remaining(deadline))
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
