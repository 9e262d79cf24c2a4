"""Joining the process groups that trainers host, as one rank of an engine.

The rendezvous is that of SGLang's and OpenRLHF's ``init_custom_process_group``: the TCP store of rank 0, then
a backend under the prefixes that torch's ``_new_process_group_helper`` gives to a group of that name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
from torch._C._distributed_c10d import ProcessGroup

from segue.errors import WeightSyncError
from segue.messages.weight_operations import Group
from segue.weight_update.transport import rendezvous
from segue.weight_update.transport.group import FOREVER, JoinedGroup, make_backend
from segue.weight_update.transport.rendezvous import Address, Stopped

MAX_ATTEMPTS = 8  # threads that join, including those of attempts that were given up and have not ended
_CLOSE_S = 5.0
_GRACE_S = 1.0
_END_S = 0.2  # between two tries to unblock the threads of attempts that were given up
_RETRY_S, _MAX_RETRY_S = 0.1, 5.0  # delay before an address is tried again: after one failure, and at most
_MAX_FAILED = 64  # addresses whose failures are remembered


@dataclass(slots=True, eq=False)
class JoinAttempt:
    """An attempt to join a group, in a thread of its own; one that need not or must not begin has ended."""

    group: Group
    deadline: float = 0.0  # by the monotonic clock; `Groups.wait` keeps it, and gives the attempt up
    not_before: float = 0.0  # by the monotonic clock
    ended: threading.Event = field(default_factory=threading.Event)  # joined, failed, or given up
    error: str | None = None  # why the group is not joined
    is_new: bool = True  # the group was not joined before
    stopped: threading.Event = field(default_factory=threading.Event)  # given up: its group is not kept
    peer: Address | None = None  # the address that accepted the connection


class Groups:
    """Holds the groups of one rank by name, and joins new ones. Any thread may call any method."""

    def __init__(self, device: torch.device, allowed: Sequence[str] = ()) -> None:
        """``device``: of this rank; NCCL needs a CUDA device. ``allowed``: see `rendezvous.resolve`."""
        self._device = device
        self._allowed = allowed
        self._lock = threading.Lock()
        self._joined: dict[str, JoinedGroup] = {}
        self._attempts: dict[str, JoinAttempt] = {}
        self._running: set[JoinAttempt] = set()  # attempts whose thread has not ended, also those given up
        self._unblocking: threading.Thread | None = None
        self._failures: dict[Address, tuple[int, float]] = {}  # store -> failures in a row, time of the last

    def get(self, name: str) -> JoinedGroup | None:
        """Returns the group that was joined under this name, dead or alive; None if there is none."""
        with self._lock:
            return self._joined.get(name)

    def drop_dead(self) -> list[str]:
        """Forget the groups that are dead or whose trainer has gone, and return their names.

        A group that a receiver uses is kept: the receiver checks its trainer itself.
        """
        with self._lock:
            dead = [name for name, each in self._joined.items() if not each.is_receiving and not each.alive]
            for name in dead:
                del self._joined[name]
        return dead

    def start(self, group: Group, tp_rank: int, timeout_s: float) -> JoinAttempt:
        """Begin to join ``group`` as rank ``group.rank_offset + tp_rank``; returns at once.

        A live group that was joined with the same parameters is kept; one with other parameters is an error
        of the attempt. A dead group is replaced. An attempt with the same parameters is shared; one with
        other parameters is given up.
        """
        device = self._device.type
        if group.backend == "nccl" and device != "cuda":
            text = f"backend 'nccl' needs an engine on CUDA, and this one is on {device!r}: use 'gloo'."
            return _ended(group, text)
        with self._lock:
            known = self._joined.get(group.name)
            if known is not None and known.alive:
                if known.group == group:
                    return _ended(group)
                return _ended(
                    group,
                    f"The group {group.name!r} is joined already, with other parameters "
                    f"({describe(known.group)}; requested: {describe(group)}): destroy it first, or use "
                    "another group_name.",
                )
            attempt = self._attempts.get(group.name)
            if attempt is not None and attempt.group == group:
                return attempt
            if attempt is not None:
                self._give_up(
                    attempt,
                    f"Joining the group {group.name!r} ({describe(attempt.group)}) was given up: no trainer "
                    f"was found there, and the group was requested with other parameters ({describe(group)})"
                    ". Retry with those, or use another group_name.",
                )
            if len(self._running) >= MAX_ATTEMPTS:
                return _ended(
                    group,
                    f"{len(self._running)} attempts to join a group have not ended, which is the limit: "
                    f"{'; '.join(describe(each.group) for each in self._running)}. Retry later.",
                )
            now = time.monotonic()
            attempt = JoinAttempt(group, now + timeout_s, now + self._retry_delay_s(group, now))
            self._attempts[group.name] = attempt
            self._running.add(attempt)
            run = partial(self._run, attempt, group.rank_offset + tp_rank)
            threading.Thread(target=run, name="join-weight-group", daemon=True).start()
            return attempt

    def wait(self, attempt: JoinAttempt, timeout_s: float) -> None:
        """Wait until an attempt has ended, and give it up if that takes longer than ``timeout_s``.

        Raises:
            WeightSyncError: the group was not joined.
        """
        if not attempt.ended.wait(timeout_s):
            with self._lock:
                if not attempt.ended.is_set():
                    self._give_up(
                        attempt,
                        f"The group {attempt.group.name!r} ({describe(attempt.group)}) was not joined within "
                        f"{timeout_s:g} s: its trainer must listen there, and all ranks must join with the "
                        "same name, world_size and backend. Check that, and retry.",
                    )
        if attempt.error is not None:
            raise WeightSyncError(attempt.error)

    def stop(self, group: Group, why: str) -> None:
        """Give up the attempt to join ``group``, if there is one."""
        with self._lock:
            attempt = self._attempts.get(group.name)
            if attempt is not None and attempt.group == group:
                self._give_up(attempt, f"Joining the group {group.name!r} was given up: {why}.")

    def leave(self, name: str) -> None:
        """Close a group's connections and forget the group.

        Raises:
            WeightSyncError: there is no group of this name.
        """
        with self._lock:
            joined = self._joined.pop(name, None)
            names = sorted(self._joined)
        if joined is None:
            raise WeightSyncError(f"There is no group {name!r}; joined groups: {names}.", param="group_name")
        joined.mark_dead("it was left")

    def close(self) -> None:
        """Leave all groups, and give up all attempts to join one."""
        with self._lock:
            joined, self._joined = list(self._joined.values()), {}
            for attempt in list(self._attempts.values()):
                self._give_up(attempt, "the engine is shutting down")
        for group in joined:
            group.mark_dead("the engine is shutting down")
        for group in joined:  # a thread inside torch while the interpreter ends would crash the process
            group.wait_ended(_CLOSE_S)

    def _retry_delay_s(self, group: Group, now: float) -> float:
        """Returns the seconds to wait before joining at a store where the last attempts have failed."""
        count, at = self._failures.get((group.master_address, group.master_port), (0, 0.0))
        return max(0.0, at + min(_RETRY_S * 2 ** min(count - 1, 16), _MAX_RETRY_S) - now) if count else 0.0

    def _record_result(self, group: Group, *, failed: bool) -> None:
        """Count the failures in a row at a store, for `_retry_delay_s`; a success forgets them."""
        where = group.master_address, group.master_port
        count, _ = self._failures.pop(where, (0, 0.0))
        if failed:
            self._failures[where] = count + 1, time.monotonic()
            if len(self._failures) > _MAX_FAILED:  # then forget the oldest one
                del self._failures[next(iter(self._failures))]

    def _give_up(self, attempt: JoinAttempt, error: str) -> None:
        """End the wait for an attempt with this error; the caller holds the lock."""
        attempt.error = error
        attempt.stopped.set()
        del self._attempts[attempt.group.name]
        attempt.ended.set()
        if self._unblocking is None:
            self._unblocking = threading.Thread(target=self._unblock_given_up, name="end-joins", daemon=True)
            self._unblocking.start()

    def _unblock_given_up(self) -> None:
        """Shut down the connections on which given-up attempts block, until all their threads have ended.

        torch's connections are known by their address alone, so those to an address that a living attempt or
        a joined group uses too are spared.
        """
        while True:
            time.sleep(_END_S)  # most threads end by themselves
            with self._lock:
                given_up = [attempt for attempt in self._running if attempt.stopped.is_set()]
                peers = {attempt.peer for attempt in given_up if attempt.peer is not None}
                peers -= {attempt.peer for attempt in self._running if not attempt.stopped.is_set()}
                peers -= {joined.peer for joined in self._joined.values() if joined.reason is None}
                if not given_up:
                    self._unblocking = None
                    return
            for peer in peers:
                rendezvous.shut_down(peer)

    def _run(self, attempt: JoinAttempt, rank: int) -> None:
        """The thread of an attempt: joins the group as `rank`, and keeps it unless the attempt was given up.

        The group that is not kept, this one or an older one of its name, is closed.
        """
        group = attempt.group
        joined: JoinedGroup | None = None
        error: str | None = None
        try:
            joined = _meet(attempt, rank, self._device, self._allowed)
        except WeightSyncError as failure:
            error = failure.message
        except Exception as failure:
            text = str(failure).strip().split("\n")[0]
            error = (
                f"The group {group.name!r} ({describe(group)}) cannot be joined: {text}. Fix this cause, and "
                "retry."
            )
        with self._lock:
            self._running.discard(attempt)
            self._record_result(group, failed=joined is None)
            unused, why = joined, "the attempt to join it was given up"
            if not attempt.stopped.is_set():
                if joined is not None:
                    unused, why = self._joined.get(group.name), "it was joined again"
                    self._joined[group.name] = joined
                attempt.error = error
                del self._attempts[group.name]
                attempt.ended.set()
        if unused is not None:
            unused.mark_dead(why)


def _ended(group: Group, error: str | None = None) -> JoinAttempt:
    """Returns an attempt for a group that is joined already, or that cannot be joined."""
    attempt = JoinAttempt(group, error=error, is_new=False)
    attempt.ended.set()
    return attempt


def _meet(attempt: JoinAttempt, rank: int, device: torch.device, allowed: Sequence[str]) -> JoinedGroup:
    """Connects to the trainer's store and joins its process group; blocks until all ranks have met.

    An attempt that follows a failed one begins a little later (`not_before`). The raw connection `link` shows
    by its end that the trainer has gone. A group of NCCL has no process group yet: its first use makes it.

    Raises:
        Stopped: the attempt was given up.
    """
    group = attempt.group
    if attempt.stopped.wait(max(0.0, attempt.not_before - time.monotonic())):
        raise Stopped
    link = rendezvous.connect(rendezvous.resolve(group, allowed), attempt.stopped)
    try:
        attempt.peer = peer = link.getpeername()[:2]
        store = rendezvous.join_store(group, rank, peer, attempt.stopped)
        # Where torch cannot be stopped, it gives up a moment after the call that waits for the attempt.
        timeout = timedelta(seconds=max(0.0, attempt.deadline - time.monotonic()) + _GRACE_S)
        store.set_timeout(timeout)
        process_group: ProcessGroup | None = None
        if group.backend == "gloo":
            process_group = make_backend(store, group, rank, timeout)
            process_group.set_timeout(FOREVER)
        store.set_timeout(FOREVER)
        return JoinedGroup(group, rank, device, store, link, process_group)
    except BaseException:
        link.close()
        raise


def describe(group: Group) -> str:
    """Returns a group's address, rank offset, world size and backend, for messages."""
    return (
        f"{group.master_address}:{group.master_port}, rank_offset {group.rank_offset}, "
        f"world_size {group.world_size}, {group.backend}"
    )
