"""The process groups that trainers host, as one rank of an engine joins them.

They are met as SGLang's and OpenRLHF's ``init_custom_process_group`` meets them: a TCP store of rank 0,
then a backend under the prefixes that torch's ``_new_process_group_helper`` gives to a group of that name.
They are not registered with torch: a trainer in the same process may have a group of this name, and ends all
those that torch knows when it destroys its default one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroup

from segue.errors import WeightSyncError
from segue.messages.weight_operations import Group
from segue.weight_update.transport import rendezvous
from segue.weight_update.transport.group import FOREVER, JoinedGroup, prefixed
from segue.weight_update.transport.rendezvous import Address, remaining

MAX_ATTEMPTS = 8  # threads that join, those included that were given up and have not ended
_CLOSE_S = 5.0
_END_S = 0.2  # between two tries to end the waits of attempts that were given up
_RETRY_S, _MAX_RETRY_S = 0.1, 5.0  # before an address is tried again: after the first failure, at most
_MAX_FAILED = 64  # addresses that are remembered


@dataclass(slots=True, eq=False)
class Attempt:
    """A group that is being joined."""

    group: Group
    timeout_s: float
    deadline: float
    not_before: float  # by the monotonic clock, as the deadline
    ended: threading.Event = field(default_factory=threading.Event)
    error: str | None = None
    stopped: threading.Event = field(default_factory=threading.Event)  # what it makes is not kept
    peer: Address | None = None  # where somebody listens


class Groups:
    """The groups of one rank, by name. Any thread may call any method."""

    def __init__(self, device: torch.device, allowed: Sequence[str] = ()) -> None:
        """``device``: the rank's own; NCCL needs a CUDA device. ``allowed``: see `rendezvous.resolve`."""
        self._device = device
        self._allowed = allowed
        self._lock = threading.Lock()
        self._joined: dict[str, JoinedGroup] = {}
        self._attempts: dict[str, Attempt] = {}
        self._trying: set[Attempt] = set()  # that have a thread
        self._ending: threading.Thread | None = None
        self._failed: dict[Address, tuple[int, float]] = {}  # store -> failures in a row, the last one's time

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
        """Meet the trainer in ``group``: :meth:`start`, then :meth:`wait`; False if it was joined before.

        Raises:
            WeightSyncError: as both.
        """
        attempt = self.start(group, tp_rank, timeout_s)
        if attempt is not None:
            self.wait(attempt, timeout_s)
        return attempt is not None

    def start(self, group: Group, tp_rank: int, timeout_s: float) -> Attempt | None:
        """Begin to meet the trainer in ``group``, as rank ``group.rank_offset + tp_rank``; returns at once.

        A group that is alive and was joined with the same parameters is kept (None), else made, and a dead
        one replaced. An attempt with the same parameters is shared; one with others is given up, and so are
        the threads of what cannot be cancelled, which end at their deadline.

        Raises:
            WeightSyncError: parameters that cannot work, a live group with others, or too many attempts.
        """
        rank = group.rank_offset + tp_rank
        _check(group, rank, self._device)
        with self._lock:
            known = self._joined.get(group.name)
            if known is not None and known.alive:
                if known.group == group:
                    return None
                raise WeightSyncError(
                    f"The group {group.name!r} is joined already, with other parameters "
                    f"({words(known.group)}; asked for: {words(group)}): destroy it first, or take another "
                    "group_name.",
                    param="group_name",
                )
            attempt = self._attempts.get(group.name)
            if attempt is not None and attempt.group == group:
                return attempt
            if attempt is not None:
                self._give_up(attempt, _superseded(attempt.group, group))
            if len(self._trying) >= MAX_ATTEMPTS:
                raise WeightSyncError(
                    f"{len(self._trying)} attempts to join a group have not ended, and there may be no more: "
                    f"{'; '.join(words(each.group) for each in self._trying)}. Retry later."
                )
            now = time.monotonic()
            attempt = Attempt(group, timeout_s, now + timeout_s, now + self._pause_s(group, now))
            self._attempts[group.name] = attempt
            self._trying.add(attempt)
            threading.Thread(
                target=self._try, args=(attempt, rank), name="join-weight-group", daemon=True
            ).start()
            return attempt

    def wait(self, attempt: Attempt, timeout_s: float) -> None:
        """Wait until an attempt has ended, and give it up if that takes longer than ``timeout_s``.

        Raises:
            WeightSyncError: nobody was met.
        """
        if not attempt.ended.wait(timeout_s):
            with self._lock:
                if not attempt.ended.is_set():
                    self._give_up(attempt, _unmet(attempt.group, timeout_s))
        if attempt.error is not None:
            raise WeightSyncError(attempt.error)

    def stop(self, group: Group, why: str) -> None:
        """Give up the attempt to join ``group``, if there is one."""
        with self._lock:
            attempt = self._attempts.get(group.name)
            if attempt is not None and attempt.group == group:
                self._give_up(attempt, f"Joining the group {group.name!r} was given up: {why}.")

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

    def _pause_s(self, group: Group, now: float) -> float:
        """How long to leave a store alone where joining has just failed, or failed several times."""
        count, at = self._failed.get((group.master_address, group.master_port), (0, 0.0))
        return max(0.0, at + min(_RETRY_S * 2 ** min(count - 1, 16), _MAX_RETRY_S) - now) if count else 0.0

    def _note(self, group: Group, *, failed: bool) -> None:
        where = group.master_address, group.master_port
        count, _ = self._failed.pop(where, (0, 0.0))
        if failed:
            self._failed[where] = count + 1, time.monotonic()
            if len(self._failed) > _MAX_FAILED:
                del self._failed[next(iter(self._failed))]

    def _give_up(self, attempt: Attempt, error: str) -> None:
        """End the wait for an attempt; the lock is held."""
        attempt.error = error
        attempt.stopped.set()
        del self._attempts[attempt.group.name]
        attempt.ended.set()
        if self._ending is None:
            self._ending = threading.Thread(target=self._end_given_up, name="end-joins", daemon=True)
            self._ending.start()

    def _end_given_up(self) -> None:
        """Shut down what the threads of attempts that were given up wait for, until all have ended."""
        while True:
            time.sleep(_END_S)  # most of them end by themselves
            with self._lock:
                given_up = [attempt for attempt in self._trying if attempt.stopped.is_set()]
                peers = {attempt.peer for attempt in given_up if attempt.peer is not None}
                peers -= {attempt.peer for attempt in self._trying if not attempt.stopped.is_set()}
                peers -= {joined.peer for joined in self._joined.values() if joined.reason is None}
                if not given_up:
                    self._ending = None
                    return
            for peer in peers:
                rendezvous.shut_down(peer)

    def _try(self, attempt: Attempt, rank: int) -> None:
        group = attempt.group
        joined: JoinedGroup | None = None
        error: str | None = None
        try:
            joined = _meet(attempt, rank, self._device, self._allowed)
        except TimeoutError:
            error = _unmet(group, attempt.timeout_s)
        except WeightSyncError as failure:
            error = failure.message
        except Exception as failure:
            timed_out = time.monotonic() >= attempt.deadline
            error = _unmet(group, attempt.timeout_s) if timed_out else _failed(group, failure)
        with self._lock:
            old = None
            self._trying.discard(attempt)
            self._note(group, failed=joined is None)
            given_up = attempt.stopped.is_set()
            if not given_up:
                if joined is not None:
                    old = self._joined.get(group.name)
                    self._joined[group.name] = joined
                attempt.error = error
                del self._attempts[group.name]
                attempt.ended.set()
        if old is not None:
            old.mark_dead("it was joined anew")
        if joined is not None and given_up:
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


def _meet(attempt: Attempt, rank: int, device: torch.device, allowed: Sequence[str]) -> JoinedGroup:
    group, deadline = attempt.group, attempt.deadline
    if attempt.stopped.wait(max(0.0, attempt.not_before - time.monotonic())):
        raise TimeoutError
    link = rendezvous.connect(rendezvous.resolve(group, allowed), deadline, attempt.stopped)
    try:
        attempt.peer = peer = link.getpeername()[:2]
        store = rendezvous.join_store(group, rank, peer, deadline, attempt.stopped)
        process_group: ProcessGroup | None = None
        if group.backend == "gloo":
            part = PrefixStore("cpu/", prefixed(store, group))
            gloo = dist.ProcessGroupGloo(part, rank, group.world_size, remaining(deadline))
            gloo.set_timeout(FOREVER)
            process_group = cast(ProcessGroup, gloo)  # it has its methods, though torch's stubs do not say so
        store.set_timeout(FOREVER)
        return JoinedGroup(group, rank, device, store, link, process_group)
    except BaseException:
        link.close()
        raise


def words(group: Group) -> str:
    """Where a group is met, and as what."""
    return (
        f"{group.master_address}:{group.master_port}, rank_offset {group.rank_offset}, "
        f"world_size {group.world_size}, {group.backend}"
    )


def _unmet(group: Group, timeout_s: float) -> str:
    return (
        f"The group {group.name!r} ({words(group)}) was not met within {timeout_s:g} s: its trainer "
        "must listen there, and all ranks must join with the same name, world_size and backend. Retry then."
    )


def _superseded(group: Group, other: Group) -> str:
    return (
        f"Joining the group {group.name!r} ({words(group)}) was given up: nobody was met there, and it was "
        f"asked for with other parameters ({words(other)}). Retry with those, or take another group_name."
    )


def _failed(group: Group, error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    return f"The group {group.name!r} ({words(group)}) cannot be joined: {text}. Retry when that is mended."
