"""The workers of a router: what is known of each, its connections, and the requests that it has.

Everything here happens on one event loop. The choice itself is `segue.router.decide`'s, which is pure.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from random import Random

from segue.laps.classes import PromptClass
from segue.messages.fleet import Role
from segue.router.breaker import LegEnd, judge
from segue.router.choice import Ask, Decision, Refuse, RoutingRules
from segue.router.decide import decide, second_claim
from segue.router.entry import LEFT, Elsewhere, RouterCounters, SentRequest, WorkerEntry
from segue.router.fleet import (
    NOTHING_HELD,
    ONLY_COMMON,
    Assignment,
    CacheName,
    FleetSnapshot,
    Held,
    Holds,
    WorkerView,
    is_common,
)
from segue.router.index import Keys, PrefixIndex
from segue.router.prompts import SEVERAL, RequestFacts
from segue.router.upstream import Upstream

UNNAMED = ""  # in place of a cohort, while discovery has not said yet which engines there are


class Registry:
    """All workers of one router."""

    def __init__(self, rules: RoutingRules, ca_file: str | None = None) -> None:
        """Start without workers.

        Args:
            rules: of a choice.
            ca_file: certificates that workers with HTTPS URLs are trusted by; None: the system's.
        """
        self._ca_file = ca_file
        self.rules = rules
        self.holds = Holds()
        self.counters = RouterCounters()
        self.elsewhere = Elsewhere()
        self.index = PrefixIndex()
        self.is_closed = False  # the router ends: no request goes on elsewhere
        # cohort -> when it was last known, or said, to have an active engine
        self.served: dict[str, float] = {}
        self._change = asyncio.Event()  # set when something has changed; then there is a new one
        # Called when a leaving worker's last request has ended.
        self.on_idle: Callable[[WorkerEntry], None] = lambda entry: None
        # Called with what the index learns here: the blocks that a worker gets, and those that it lacked.
        self.on_given: Callable[[Keys, str, CacheName | None], None] = lambda keys, worker, cache: None
        self.on_lacked: Callable[[Keys, str, int, int], None] = lambda keys, worker, predicted, cached: None
        self._entries: dict[str, WorkerEntry] = {}
        self._numbers = count()
        self._random = Random()

    # --- who is there ---

    def __iter__(self) -> Iterator[WorkerEntry]:
        return iter(list(self._entries.values()))

    @property
    def addressed(self) -> list[WorkerEntry]:
        """The workers that operations on all workers go to: of each cohort only the highest epoch."""
        return [entry for entry in self if not entry.is_replaced]

    def get(self, worker: str) -> WorkerEntry | None:
        """Returns a worker by its id; None: there is no such worker."""
        return self._entries.get(worker)

    def at(self, url: str) -> WorkerEntry | None:
        """Returns the worker with a URL; None: there is no such worker."""
        return next((entry for entry in self._entries.values() if entry.url == url), None)

    def add(self, url: str, role: Role | None = None) -> WorkerEntry:
        """Register a worker, whose id must be new; ``role``: the only one that it may have; None: any."""
        entry = WorkerEntry(url, Upstream(url, self._ca_file), role=role)
        assert entry.id not in self._entries
        self._entries[entry.id] = entry
        return entry

    def remove(self, entry: WorkerEntry) -> None:
        """Forget a worker at once."""
        del self._entries[entry.id]
        text = "the router ends" if self.is_closed else "the worker was removed from the router"
        entry.upstream.abort_all("cut", text)
        self.holds.drop(entry.id)
        self.index.forget(entry.id)
        self.counters.note_left(entry.id)

    def num_requests(self, worker: str | None = None) -> int:
        """Returns the requests in flight on a worker, on all of them for None; of all processes together."""
        held = self._held()
        return sum(held[each].num_requests for each in held if worker in (None, each))

    def pending(self) -> dict[PromptClass, int]:
        """Returns the requests of each class whose prompts are in flight, of all processes together."""
        there = self.elsewhere.pending
        return {each: number + there.get(each, 0) for each, number in self.holds.pending().items()}

    def _held(self) -> dict[str, Held]:
        """Returns what is in flight on each worker, of all processes together."""
        held = dict(self.holds.by_worker())
        for worker, there in self.elsewhere.held.items():
            held[worker] = held.get(worker, NOTHING_HELD).plus(there)
        return held

    # --- waiting for another worker ---

    def changed(self) -> None:
        """Wake the requests that wait for a worker: there may be one now."""
        change, self._change = self._change, asyncio.Event()
        change.set()

    async def wait_for_change(self, timeout_s: float) -> None:
        """Wait until something has changed, for at most some seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._change.wait()

    def vacancies(self, is_gone: Callable[[WorkerView], bool], now: float) -> dict[str, float]:
        """Returns the cohorts that have lost their active engine, and for how many seconds each has had none.

        That is as far as the router knows and a request has found: ``is_gone`` says which of the engines have
        failed at it.
        """
        active = {view.record.cohort for view in self.views() if view.is_active and not is_gone(view)}
        return {cohort: now - last for cohort, last in sorted(self.served.items()) if cohort not in active}

    # --- requests ---

    def views(self) -> list[WorkerView]:
        """Returns every worker that has said who it is."""
        return [entry.view for entry in self if entry.view is not None]

    def choose(
        self, facts: RequestFacts, tried: frozenset[str], now: float, outputs: int | None = None
    ) -> Decision:
        """Choose the workers of a request, except those that were ``tried``.

        A worker that is paused keeps requests until it goes on. So it is chosen if no other one can be.

        Args:
            facts: of the request.
            tried: workers that do not get it.
            now: the time.
            outputs: the tokens that the client has; None: the reply has not begun.
        """
        ask, views = self._ask(facts, tried, outputs), self.views()
        held = self._held()
        snapshot = FleetSnapshot(workers=views, held=held)
        decision = decide(ask, snapshot, now, self.rules, self._random)
        if not isinstance(decision, Refuse):
            return decision
        if any(view.report is not None and view.report.paused for view in views):
            snapshot = FleetSnapshot(workers=[view.as_if_running() for view in views], held=held)
            if not isinstance(kept := decide(ask, snapshot, now, self.rules, self._random), Refuse):
                return kept
        reasons = [(entry.id, entry.problem) for entry in self if entry.view is None]
        problem = "no worker can take the request" if reasons else decision.problem
        unserved = self._unserved(facts.native_route)
        return Refuse(problem=problem, reasons=[*decision.reasons, *reasons], unserved=unserved)

    def choose_any(self, path: str, tried: frozenset[str], now: float) -> Assignment | Refuse:
        """Choose a worker for a request of a route that costs nothing, except those that were ``tried``."""
        reasons = []
        for entry in self:
            reason = "it has failed at this request" if entry.id in tried else entry.why_not(now)
            if reason is None and entry.view is not None:
                if entry.view.has_all_routes or is_common(path):
                    return Assignment(worker=entry.view, seconds=0.0, num_tokens=0, hit=0)
                reason = ONLY_COMMON
            reasons.append((entry.id, reason or ""))
        problem = "no worker can take the request" if reasons else "no worker is registered"
        return Refuse(
            problem=problem, reasons=reasons, unserved=self._unserved("" if is_common(path) else path)
        )

    @property
    def has_all_routes(self) -> bool:
        """Whether one of the workers has all routes of an engine, even if it does not serve now."""
        return any(entry.view is not None and entry.view.has_all_routes for entry in self)

    def _unserved(self, native_route: str) -> str:
        """Returns a route that not every worker has if all workers are known to lack it; "": they are not."""
        views = [entry.view for entry in self]
        is_known = bool(views) and None not in views
        return native_route if is_known and not self.has_all_routes else ""

    def second_claim(
        self, facts: RequestFacts, prefill: str, tried: frozenset[str], now: float, outputs: int | None
    ) -> Assignment | None:
        """Choose another decode worker for KV that ``prefill`` still offers; None: there is none."""
        snapshot = FleetSnapshot(workers=self.views(), held=self._held())
        ask = self._ask(facts, tried, outputs)
        return second_claim(ask, prefill, snapshot, now, self.rules, self._random)

    def _ask(self, facts: RequestFacts, tried: frozenset[str], outputs: int | None) -> Ask:
        """Returns what is asked for.

        The estimate is cut to what every worker can take: only the worker counts exactly, and it refuses a
        prompt that is too long with an error that says so.
        """
        longest = min((view.record.max_seq_len for view in self.views()), default=SEVERAL + 1)
        num_tokens = min(facts.num_tokens + (outputs or 0), longest - facts.max_new_tokens)
        rate = facts.num_tokens / max(1, facts.prompt_bytes)
        return Ask(
            number=next(self._numbers),
            num_tokens=max(1, num_tokens),
            max_new_tokens=facts.max_new_tokens,
            hits={worker: int(size * rate) for worker, size in self.index.match(facts.keys).items()},
            tried=tried,
            is_resumed=outputs is not None,
            is_native=bool(facts.native_route),
        )

    def begin(self, assignment: Assignment, now: float, keys: Keys | None = None) -> SentRequest:
        """Count a request that is sent to a worker now; ``keys``: of the prompt whose KV it will have."""
        entry = self._entries[assignment.worker.id]
        assert entry.view is not None
        breaker, probe = entry.view.breaker.admitted(now)
        entry.view = replace(entry.view, breaker=breaker)
        if keys:
            self.index.add(keys, entry.id, assignment.worker.cache)
            self.on_given(keys, entry.id, assignment.worker.cache)
        return SentRequest(entry=entry, hold=self.holds.take(assignment, now), probe=probe)

    def note_cached(self, facts: RequestFacts, assignment: Assignment, cached_tokens: int) -> None:
        """Take back what the index claims of a worker that had much less of a prompt than was predicted.

        A prompt's tokens have different lengths, so half of what was predicted counts as right.
        """
        if 2 * cached_tokens < assignment.hit:
            size = facts.prompt_bytes // facts.num_tokens * cached_tokens
            self.index.correct(facts.keys, assignment.worker.id, facts.prompt_bytes, size)
            self.on_lacked(facts.keys, assignment.worker.id, facts.prompt_bytes, size)

    def end(self, sent: SentRequest, end: LegEnd, status: int, code: str | None) -> None:
        """Count the end of a request, whichever it was; ``status`` and ``code`` are of its reply."""
        entry = sent.entry
        self.holds.release(sent.hold)
        self.counters.count_end(entry.id if self._entries.get(entry.id) is entry else LEFT, end)
        if entry.view is not None:
            verdict = judge(end, status, code)
            breaker = entry.view.breaker.ended(verdict, sent.probe, time.monotonic())
            entry.view = replace(entry.view, breaker=breaker)
        if entry.is_leaving and self._entries.get(entry.id) is entry and not self.num_requests(entry.id):
            self.on_idle(entry)
