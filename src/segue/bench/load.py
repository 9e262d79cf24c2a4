"""Puts a load on a server and summarises the latencies: arrivals, client processes, percentiles."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from math import exp, log
from typing import Any

from segue.bench.client import Client, Job, Timeline, clock

LEAD_S = 1.0  # from handing out the jobs to the load's begin, so that requests are encoded before


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Uniformly drawn lengths in tokens, both ends included, of prompts without common prefixes.

    With `text` a prompt is a text of that many numbers, for servers that take no token ids.
    """

    prompt: tuple[int, int] = (100, 1024)
    output: tuple[int, int] = (64, 512)
    max_id: int = 10_000  # the largest token id
    text: bool = False

    def job(self, rng: random.Random, due: float = 0.0) -> Job:
        """Draw one request."""
        prompt = [rng.randint(0, self.max_id) for _ in range(rng.randint(*self.prompt))]
        return Job(
            prompt=" ".join(map(str, prompt)) if self.text else prompt,
            max_tokens=rng.randint(*self.output),
            due=due,
        )

    @property
    def mean_output(self) -> float:
        """The mean number of output tokens."""
        return sum(self.output) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """Log-normal lengths in tokens, drawn again while they are outside of the bounds."""

    median: float
    sigma: float
    least: int
    most: int

    def draw(self, rng: random.Random) -> int:
        """Draw one length."""
        while (
            not self.least <= (length := round(self.median * rng.lognormvariate(0, self.sigma))) <= self.most
        ):
            pass
        return length

    @property
    def mean(self) -> float:
        """The mean length."""
        least, most = (log(each / self.median) / self.sigma for each in (self.least - 0.5, self.most + 0.5))
        normal = statistics.NormalDist().cdf
        inside = normal(most) - normal(least)
        weighted = normal(most - self.sigma) - normal(least - self.sigma)
        return self.median * exp(self.sigma**2 / 2) * weighted / inside


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Short prompts, and among them long ones.

    The default is that of `bench.laps`: chats beside documents, without common prefixes. With `prefixes`, one
    of them, each as likely as the others, comes before the tokens that are drawn.
    """

    long_share: float = 0.05
    short: LogNormal = LogNormal(median=17, sigma=1.6, least=1, most=256)
    long: LogNormal = LogNormal(median=6000, sigma=0.6, least=2000, most=16_000)
    output: tuple[int, int] = (1, 1)
    max_id: int = 10_000  # the largest token id
    prefixes: Sequence[Sequence[int]] = ()  # token ids

    def draw(self, rng: random.Random) -> tuple[int, int, str]:
        """Draw one request: the lengths of prompt and output, and the class."""
        label = "long" if rng.random() < self.long_share else "short"
        length = (self.long if label == "long" else self.short).draw(rng)
        return length, rng.randint(*self.output), label

    def job(self, rng: random.Random, due: float = 0.0) -> Job:
        """Draw one request."""
        length, max_tokens, label = self.draw(rng)
        prefix = rng.choice(self.prefixes) if self.prefixes else ()
        prompt = [*prefix, *(rng.randint(0, self.max_id) for _ in range(length))]
        return Job(prompt=prompt, max_tokens=max_tokens, due=due, label=label)

    @property
    def mean_prompt(self) -> float:
        """The mean number of prompt tokens, without the prefixes."""
        return self.long_share * self.long.mean + (1 - self.long_share) * self.short.mean

    @property
    def mean_output(self) -> float:
        """The mean number of output tokens."""
        return sum(self.output) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SLO:
    """The limits that a request must keep to count as good."""

    ttft: float = 0.2  # seconds to the first token
    gap: float = 0.05  # seconds between two tokens, in 99 of 100 gaps


def arrivals(rate: float, seconds: float, burstiness: float, rng: random.Random) -> list[float]:
    """Draw the arrival times of requests, in seconds: gaps are Gamma-distributed with shape `burstiness`.

    1 is a Poisson process; a lower value gives bursts, a higher one steadier arrivals, at the same mean rate.
    """
    found, now = [], 0.0
    while (now := now + rng.gammavariate(burstiness, 1 / (rate * burstiness))) < seconds:
        found.append(now)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The timelines of one load, as the clients saw it."""

    begin: float
    timelines: list[Timeline]
    client_cpu: float  # share of a core that the busiest client process used

    def of(self, label: str) -> Run:
        """Return the run of one class of requests."""
        return replace(self, timelines=[t for t in self.timelines if t.label == label])

    def prompt_tokens_per_s(self, since: float, until: float) -> float:
        """Return the prompt tokens per second of the requests that ended between these seconds of the load.

        It tells the throughput of prefill better than the number of requests does, of which one may have a
        thousand times as many tokens as another one.
        """
        first, last = self.begin + since, self.begin + until
        ended = [t for t in self.timelines if t.error is None and not t.given_up]
        return sum(t.prompt_tokens for t in ended if first <= t.times[-1] < last) / (until - since)

    def summary(self, *, since: float, until: float, slo: SLO) -> dict[str, Any]:
        """Summarise the time from `since` to `until` after the begin: latencies in seconds, rates per second.

        First tokens and ends count if their request was due in that time; a gap counts if it ended in it.
        """
        first, last = self.begin + since, self.begin + until
        asked = [t for t in self.timelines if first <= t.due < last]
        done = [t for t in asked if t.error is None and not t.given_up]
        whole = [t for t in self.timelines if t.error is None and not t.given_up]
        arrived = [when for t in self.timelines for when in t.times if first <= when < last]
        gaps = [b - a for t in self.timelines for a, b in pairwise(t.times) if first <= b < last]
        return {
            "requests": len(asked),
            "unfinished": sum(t.given_up for t in asked),
            "failed": sum(t.error is not None for t in asked),
            "errors": sorted({t.error for t in asked if t.error is not None})[:5],
            "events_per_s": len(arrived) / (until - since),
            "tokens_per_event": sum(t.tokens for t in whole) / max(1, sum(len(t.times) for t in whole)),
            "ttft_s": percentiles([t.times[0] - t.due for t in asked if t.times]),
            "gap_s": percentiles(gaps),
            "end_s": percentiles([t.times[-1] - t.due for t in done]),
            "good_per_s": sum(keeps(t, slo) for t in done) / (until - since),
            "good_share": sum(keeps(t, slo) for t in done) / max(1, len(asked)),
            "send_lag_p99_s": percentiles([t.sent - t.due for t in asked])["p99"],
            "client_cpu": self.client_cpu,
        }


def keeps(timeline: Timeline, slo: SLO) -> bool:
    """Whether a request that has ended kept `slo`."""
    gaps = [b - a for a, b in pairwise(timeline.times)]
    return timeline.times[0] - timeline.due <= slo.ttft and (not gaps or percentile(gaps, 0.99) <= slo.gap)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed; NaN if there are none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the mean, p50, p90, p99 and the maximum."""
    return {
        "mean": statistics.fmean(values) if values else float("nan"),
        **{f"p{round(100 * share)}": percentile(values, share) for share in (0.5, 0.9, 0.99)},
        "max": max(values, default=float("nan")),
    }


class Clients:
    """A pool of client processes that together put a load on one server."""

    def __init__(
        self,
        url: str,
        model: str,
        processes: int,
        *,
        key: str | None = None,
        chat: bool = False,
        exact: bool = True,
    ) -> None:
        """Start the processes; the other arguments are those of `Client`."""
        self._make_client = partial(Client, url, model, key=key, chat=chat, exact=exact)
        self._count = processes
        self._pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
        list(self._pool.map(time.sleep, [0.2] * processes))  # so that each process is started

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def open_loop(
        self,
        rate: float,
        seconds: float,
        *,
        lengths: Lengths | Mixture,
        burstiness: float,
        seed: int,
        patience: float,
    ) -> Run:
        """Send `rate` requests per second for `seconds`; give up those not done `patience` seconds later."""
        rng = random.Random(seed)
        jobs = [lengths.job(rng, due) for due in arrivals(rate, seconds, burstiness, rng)]
        return self._run([(jobs[i :: self._count], None) for i in range(self._count)], seconds + patience)

    def closed_loop(
        self, concurrency: int, seconds: float, *, lengths: Lengths | Mixture, max_requests: int, seed: int
    ) -> Run:
        """Keep `concurrency` requests running for `seconds`; `max_requests` are prepared.

        Raises:
            RuntimeError: the prepared requests were too few.
        """
        rng = random.Random(seed)
        jobs = [lengths.job(rng) for _ in range(max_requests)]
        shares = [len(range(i, concurrency, self._count)) for i in range(self._count)]
        run = self._run([(jobs[i :: self._count], shares[i]) for i in range(self._count)], seconds)
        if len(run.timelines) == max_requests:
            raise RuntimeError(
                f"all {max_requests} requests were sent before {seconds:g} s were over; prepare more"
            )
        return run

    def _run(self, shares: Sequence[tuple[list[Job], int | None]], seconds: float) -> Run:
        """Run one share per client process, all from the same begin on, and join their timelines.

        A share has its jobs, and how many of them run at any time; None: each is sent when it is due.
        """
        begin = clock() + LEAD_S
        futures = [
            self._pool.submit(_load, self._make_client, jobs, concurrency, begin, begin + seconds)
            for jobs, concurrency in shares
        ]
        results = [future.result(seconds + 120) for future in futures]
        return Run(
            begin=begin,
            timelines=[timeline for timelines, _ in results for timeline in timelines],
            client_cpu=max(cpu for _, cpu in results),
        )


def _load(
    make_client: Callable[[], Client], jobs: list[Job], concurrency: int | None, begin: float, end: float
) -> tuple[list[Timeline], float]:
    """Run the jobs in a client process; return the timelines and the share of a core that it used.

    `concurrency` is the number of jobs that run at any time; None: each is sent when it is due. The garbage
    collector is off meanwhile, since its pauses would count as latencies of the server.
    """
    client = make_client()
    gc.collect()
    gc.disable()
    try:
        wall, cpu = clock(), time.process_time()
        connections = asyncio.run(
            client.open_loop(jobs, begin, end)
            if concurrency is None
            else client.closed_loop(jobs, concurrency, begin, end)
        )
        share = (time.process_time() - cpu) / (clock() - wall)
        return [connection.timeline() for connection in connections], share
    finally:
        gc.enable()
