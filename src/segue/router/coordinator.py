"""Coordinates the processes that serve a router's clients.

The coordinator watches the workers and owns their groups; it serves no clients. It tells the processes what
it knows, and they tell it what they have in flight. A process that ends is started again: its clients lose
their connections, and what it had in flight counts no longer.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import reduce

from msgspec import structs

from segue.children import describe_exit, import_path
from segue.errors import ChildStartError
from segue.laps.classes import PromptClass
from segue.listener import sibling
from segue.logs import logger
from segue.router.breaker import Breaker
from segue.router.entry import Elsewhere, RouterCounters
from segue.router.fleet import NOTHING_HELD, Held
from segue.router.process_link import ProcessLink, packed
from segue.router.process_messages import (
    BeginServing,
    EndServing,
    FromProcess,
    HeldElsewhere,
    ProcessReport,
)
from segue.router.router import Router
from segue.router.shared_fleet import SharedFleet

# -P: files in the user's directory must not shadow modules of the standard library.
COMMAND = (sys.executable, "-P", "-m", "segue.router.serving_process")
# Between two states; a change that is more than a worker's load is told at once. With one worker and two
# processes, the coordinator takes 2.8 % of a core at 0.02 s, 1.2 % at 0.05 s, and each process half of that.
PERIOD_S = 0.05
HANGS_S = 10.0  # a process that has taken no state for longer hangs, and is killed
SETTLE_S = 1.0  # for an operation to be known to all processes before it is answered
STOP_S = 5.0  # from the end of a drain until a process is killed
# The first restart is at once. A process that lived for less than `STEADY_S` waits before the next one:
# `BACKOFF_S` first, and twice as long each further time.
STEADY_S, BACKOFF_S, MOST_BACKOFF_S = 10.0, 0.5, 30.0


@dataclass(slots=True, eq=False)
class ServingProcess:
    """One running process, as the coordinator knows it."""

    number: int
    process: asyncio.subprocess.Process
    link: ProcessLink[FromProcess]
    report: ProcessReport | None = None  # the last one; None: it has not said that it is there
    first_version: int = 0  # of the state that it got first
    silent_s: float = 0.0  # since it has taken a state, not counting times when this process stood still

    @property
    def version(self) -> int:
        """The version of the last state that it has taken; before that, of the one before the first."""
        taken = 0 if self.report is None else self.report.version
        return taken or self.first_version - 1


class Coordinator:
    """The processes of one router."""

    def __init__(self, router: Router, listener: socket.socket, address: bytes) -> None:
        """Start nothing yet.

        Args:
            router: knows the workers.
            listener: bound to the port of the router; it never listens.
            address: of the Unix socket where this process answers what it answers for all.
        """
        self.is_ready = asyncio.Event()  # every process has begun to serve
        self._router = router
        self._listener = listener
        self._begin = BeginServing(config=asdict(router.config), address=address)
        # Keys of prompts are Python's hashes, which must be the same in all processes.
        self._hash_seed = str(secrets.randbits(32))
        self._fleet = SharedFleet(router.registry)
        self._running: dict[int, ServingProcess] = {}
        self._has_served: set[int] = set()  # numbers of processes that were ready once
        self._ended_counters = RouterCounters()  # of processes that have ended
        self._changed = asyncio.Event()  # something must be told at once
        self._taken = asyncio.Event()  # a process has taken a state
        self._end: EndServing | None = None  # what the processes were told last of their end
        self._ends = asyncio.Event()  # they were told of it
        router.membership.on_change = self._changed.set
        router.is_settled = self._is_settled

    # --- for the one who runs it ---

    async def run(self) -> None:
        """Run the processes until :meth:`end` has ended them all.

        Raises:
            ChildStartError: a process ended before it was ready for the first time.
        """
        telling = asyncio.create_task(self._tell())
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(self._router.config.processes):
                    group.create_task(self._keep(number))
        except BaseExceptionGroup as group:  # `except*` would wrap what it raises, in some versions of Python
            failed = group.subgroup(ChildStartError)
            if failed is None:
                raise
            raise failed.exceptions[0] from None
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)

    def end(self, drain_s: float) -> None:
        """Let the processes end once their requests have ended, within ``drain_s`` seconds; 0: at once."""
        self._end = EndServing(drain_s=drain_s)
        self._ends.set()
        for process in self._running.values():
            process.link.send(self._end)

    async def settle(self) -> None:
        """Wait until all processes have taken what is known now, and have told what they have now.

        A process that hangs is waited for ``SETTLE_S`` seconds.
        """
        version = self._fleet.version + 1
        self._changed.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while any(process.version < version for process in self._serving()):
                    self._taken.clear()
                    await self._taken.wait()

    # --- one process ---

    async def _keep(self, number: int) -> None:
        """Run a process, and another one when it ends, until all are to end."""
        backoff_s = 0.0
        while self._end is None:
            began = time.monotonic()
            try:
                reason = await self._live(number)
            except OSError as error:
                reason = f"because it could not be started ({error.strerror})"
            if self._end is not None:
                return
            if number not in self._has_served:
                text = f"process {number} of the router ended {reason} before it was ready; see its log above"
                raise ChildStartError(text)
            if time.monotonic() - began >= STEADY_S:
                backoff_s = 0.0
            when = f"in {backoff_s:g} s" if backoff_s else "now"
            text = "process %d of the router ended %s; it is started again %s"
            logger.error(text, number, reason, when)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ends.wait(), backoff_s)
            backoff_s = min(max(BACKOFF_S, 2 * backoff_s), MOST_BACKOFF_S)

    async def _live(self, number: int) -> str:
        """Start a process, and accompany it to its end; returns how it ended."""
        process = await self._start(number)
        self._running[number] = process
        try:
            process.link.send(self._begin)
            if self._end is not None:
                process.link.send(self._end)
            async for message in process.link:
                self._take(process, message)
            with suppress(TimeoutError):
                await asyncio.wait_for(process.process.wait(), STOP_S)
        finally:
            with suppress(ProcessLookupError):
                process.process.kill()
            code = await process.process.wait()
            await process.link.close()
            del self._running[number]
            if process.report is not None:
                self._ended_counters = self._ended_counters.plus(process.report.counters)
            self._add_up()
        return describe_exit(code)

    async def _start(self, number: int) -> ServingProcess:
        ours, theirs = socket.socketpair()
        try:
            with theirs, sibling(self._listener) as listener:
                process = await asyncio.create_subprocess_exec(
                    *COMMAND,
                    str(theirs.fileno()),
                    str(listener.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), listener.fileno()),
                    env=os.environ | import_path(os.environ) | {"PYTHONHASHSEED": self._hash_seed},
                    start_new_session=True,  # Ctrl-C in the terminal reaches only this process
                )
        except OSError:
            ours.close()
            raise
        return ServingProcess(number, process, await ProcessLink.open(ours, FromProcess))

    def _take(self, process: ServingProcess, message: FromProcess) -> None:
        """Take a process's message."""
        if not isinstance(message, ProcessReport):  # news of prompts, for all others
            data = packed(message)
            for other in self._running.values():
                if other is not process and other.report is not None:
                    other.link.send_packed(data)
            return
        before, process.report = process.report, message
        if before is None:
            process.first_version = self._fleet.version
            process.link.send(self._fleet.last_state())
        elif message.version and process.number not in self._has_served:
            self._has_served.add(process.number)
            if len(self._has_served) == self._router.config.processes:
                self.is_ready.set()
        process.silent_s = 0.0
        self._taken.set()
        if before is None or structs.replace(before, version=message.version) != message:
            self._add_up()
        else:
            self._let_go()

    # --- all of them ---

    async def _tell(self) -> None:
        """Tell the processes every state, until this is cancelled."""
        told_at = time.monotonic()
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), PERIOD_S)
            self._changed.clear()
            before, told_at = told_at, time.monotonic()
            state = packed(self._fleet.next_state())
            for process in self._serving():
                process.link.send_packed(state)
                process.silent_s += min(told_at - before, 4 * PERIOD_S)
                if process.silent_s > HANGS_S:
                    logger.error("process %d of the router hangs, and is killed", process.number)
                    with suppress(ProcessLookupError):
                        process.process.kill()

    def _serving(self) -> list[ServingProcess]:
        """Returns the processes that take states."""
        return [process for process in self._running.values() if process.report is not None]

    def _is_settled(self) -> bool:
        """Whether every process has taken a state behind the last change, and has reported since."""
        version = self._fleet.version
        return not self._changed.is_set() and all(each.version >= version for each in self._serving())

    def _let_go(self) -> None:
        """Forget workers that leave, and have no requests any more."""
        for entry in self._router.registry:
            if entry.is_leaving and self._router.is_idle(entry):
                self._router.forget(entry)

    def _note_breakers(self, breakers: Sequence[Mapping[str, Breaker]]) -> None:
        """Note the breakers of all processes: a worker's is open here if it is open in each of them."""
        for entry in self._router.registry:
            found = [each[entry.id] for each in breakers if entry.id in each]
            is_open = found and len(found) == len(breakers)
            breaker = min(found, key=lambda each: each.probe_at) if is_open else Breaker()
            if entry.view is not None and entry.view.breaker != breaker:
                entry.view = replace(entry.view, breaker=breaker)

    def _add_up(self) -> None:
        """Add up the processes' reports, and tell each one what the others have in flight."""
        reports = {each.number: each.report for each in self._running.values() if each.report is not None}
        held = _sum_held(report.held for report in reports.values())
        pending: dict[PromptClass, int] = {}
        counters = reduce(RouterCounters.plus, (r.counters for r in reports.values()), self._ended_counters)
        for report in reports.values():
            for each, count in report.pending.items():
                pending[each] = pending.get(each, 0) + count
        self._router.registry.elsewhere = Elsewhere(held=held, pending=pending, counters=counters)
        self._note_breakers([report.breakers for report in reports.values()])
        for number in reports:
            others = _sum_held(report.held for other, report in reports.items() if other != number)
            self._running[number].link.send(HeldElsewhere(held=others))
        self._let_go()


def _sum_held(shares: Iterable[Mapping[str, Held]]) -> dict[str, Held]:
    """Returns what several processes have in flight together, by worker."""
    total: dict[str, Held] = {}
    for share in shares:
        for worker, held in share.items():
            total[worker] = total.get(worker, NOTHING_HELD).plus(held)
    return total
