"""One worker of a router, one request that was sent there, and the totals of all requests."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from urllib.parse import urlsplit

from segue.frontend.stats import FIRST_TOKEN_MS, PHASE_S, REQUEST_S
from segue.laps.classes import PromptClass
from segue.messages.fleet import Role
from segue.router.breaker import LegEnd
from segue.router.fleet import Held, Hold, WorkerView
from segue.router.upstream import Upstream
from segue.router.upstream_connection import UpstreamConnection

NOT_REACHED = "the router has not reached it yet"
LEFT = "left"  # in place of the ids of workers that have left


@dataclass(slots=True, eq=False)
class WorkerEntry:
    """One registered worker."""

    id: str = field(init=False)  # in this router: host and port of its URL
    url: str
    upstream: Upstream
    view: WorkerView | None = None  # None: it has not said who it is
    problem: str = NOT_REACHED  # why there is no connection for reports; "": there is one
    role: Role | None = None  # that the options say it has; None: any
    cohort: str = ""  # that its registration names
    is_drained: bool = False  # an operator wants it to get no new requests
    num_changes: int = 0  # of its role, or pauses, that are under way: it gets no new requests meanwhile
    is_leaving: bool = False  # it gets no new requests, and goes once it has none
    has_lapsed: bool = False  # no source has it any more: it leaves when its reports end
    has_returned: bool = False  # a source has its URL again while it leaves: another process is there
    last_cut: tuple[int, LegEnd, str] = (0, "cut", "")  # how often all of its requests were ended; how, why
    on_change: Callable[[], None] = lambda: None  # called when it gets no more requests, or gets them again

    def __post_init__(self) -> None:
        self.id = urlsplit(self.url).netloc

    def cut(self, end: LegEnd, text: str, spared: UpstreamConnection | None = None) -> None:
        """Close every connection but one; whoever waits for a reply gets an UpstreamError."""
        self.last_cut = self.last_cut[0] + 1, end, text
        self.upstream.abort_all(end, text, spared)
        self.on_change()

    @property
    def gets_none(self) -> bool:
        """Whether it gets no new requests, whatever it reports."""
        return self.is_drained or self.is_leaving or self.num_changes > 0

    def drain(self, is_drained: bool) -> None:
        """Send it no new requests, or send it some again, unless there is another reason for none."""
        self.is_drained = is_drained
        self._show_drain()

    def leave(self) -> None:
        """Send it no new requests any more."""
        self.is_leaving = True
        self._show_drain()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Send it no new requests for the block, in which it changes."""
        self.num_changes += 1
        self._show_drain()
        try:
            yield
        finally:
            self.num_changes -= 1
            self._show_drain()

    def _show_drain(self) -> None:
        if self.view is not None:
            self.view = replace(self.view, is_drained=self.gets_none)
        self.on_change()

    @property
    def prefills(self) -> bool:
        """Whether it is an engine that computes prompts, not only those that a decode worker has to."""
        view = self.view
        return view is not None and view.record.role != "decode" and not view.is_foreign

    @property
    def known_cohort(self) -> str:
        """The cohort that it has named itself; until then that of its registration."""
        return self.cohort if self.view is None else self.view.record.cohort

    @property
    def is_replaced(self) -> bool:
        """Whether another worker of its cohort has a higher epoch."""
        return self.view is not None and self.view.record.epoch < self.view.newest_epoch

    def why_not(self, now: float) -> str | None:
        """Returns why it gets no request now; None: it may get one."""
        if self.view is None or (self.problem and not self.view.connected):
            return self.problem
        return self.view.why_not(now)

    def only_paused(self, now: float) -> bool:
        """Whether a pause is all that keeps it from new requests: it keeps those that it gets until then."""
        if self.view is None or self.problem or self.view.why_not(now) is None:
            return False
        return self.view.as_if_running().why_not(now) is None


@dataclass(frozen=True, slots=True, kw_only=True)
class SentRequest:
    """One request that has been sent to a worker, until it ends."""

    entry: WorkerEntry
    hold: Hold
    probe: int  # its number as a probe of the worker's circuit breaker


@dataclass(slots=True)
class Tally:
    """What a histogram has counted; its bounds, `BOUNDS`, are not sent from process to process."""

    counts: list[int]  # by upper bound; the last one is infinite
    total: float = 0.0  # seconds

    def observe(self, bounds: Sequence[float], value: float) -> None:
        """Count a value, in seconds."""
        self.counts[bisect_left(bounds, value)] += 1
        self.total += value

    def plus(self, other: Tally) -> Tally:
        """Returns the sums."""
        return Tally(
            [a + b for a, b in zip(self.counts, other.counts, strict=True)], self.total + other.total
        )

    def cumulative(self, bounds: Sequence[float]) -> list[tuple[str, int]]:
        """Returns (upper bound, number of values up to it) for every bound."""
        return list(zip([*map(str, bounds), "+Inf"], accumulate(self.counts), strict=True))


# Upper bounds of a router's histograms, in seconds: those of an engine's.
BOUNDS: Mapping[str, Sequence[float]] = {
    "queue": PHASE_S,
    "first_token": [each / 1000 for each in FIRST_TOKEN_MS],
    "request": REQUEST_S,
}


def _tallies() -> dict[str, Tally]:
    return {name: Tally([0] * (len(bounds) + 1)) for name, bounds in BOUNDS.items()}


@dataclass(slots=True)
class RouterCounters:
    """Totals since the start."""

    # By worker and end; those of all workers that have left are counted together, as of `LEFT`.
    requests: dict[tuple[str, LegEnd], int] = field(default_factory=dict)
    retries: int = 0  # further attempts of requests whose clients had nothing yet
    resumes: int = 0  # further attempts of the others
    second_claims: int = 0  # of both, those at a decode worker that claimed KV that was still offered
    pairs: int = 0  # attempts at a prefill worker and a decode worker
    local: int = 0  # attempts at a decode worker alone
    waits: int = 0  # requests that waited for a worker to take another one's place
    refused: int = 0  # requests that no worker could take
    control: dict[tuple[str, str], int] = field(default_factory=dict)  # by route and "done" or "failed"
    tallies: dict[str, Tally] = field(default_factory=_tallies)  # by the name in `BOUNDS`

    def observe(self, name: str, seconds: float) -> None:
        """Count a value in one of the histograms."""
        self.tallies[name].observe(BOUNDS[name], seconds)

    def count_end(self, worker: str, end: LegEnd, number: int = 1) -> None:
        """Count ends of requests."""
        self.requests[worker, end] = self.requests.get((worker, end), 0) + number

    def note_left(self, worker: str) -> None:
        """Count what a worker has had for `LEFT`: workers come and go without end, and have new names."""
        for key in [key for key in self.requests if key[0] == worker]:
            self.count_end(LEFT, key[1], self.requests.pop(key))

    def count_control(self, route: str, is_done: bool) -> None:
        """Count an operation that was sent to all workers; ``is_done``: all of them did it."""
        key = route, "done" if is_done else "failed"
        self.control[key] = self.control.get(key, 0) + 1

    def plus(self, other: RouterCounters) -> RouterCounters:
        """Returns the sums."""
        return RouterCounters(
            requests=dict(Counter(self.requests) + Counter(other.requests)),
            retries=self.retries + other.retries,
            resumes=self.resumes + other.resumes,
            second_claims=self.second_claims + other.second_claims,
            pairs=self.pairs + other.pairs,
            local=self.local + other.local,
            waits=self.waits + other.waits,
            refused=self.refused + other.refused,
            control=dict(Counter(self.control) + Counter(other.control)),
            tallies={name: each.plus(other.tallies[name]) for name, each in self.tallies.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """What the other processes of a router have, where several share the clients."""

    held: Mapping[str, Held] = field(default_factory=dict)  # by worker
    pending: Mapping[PromptClass, int] = field(default_factory=dict)  # requests whose prompts are in flight
    counters: RouterCounters = field(default_factory=RouterCounters)
