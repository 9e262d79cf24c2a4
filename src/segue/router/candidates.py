"""Which workers could do a part of a request, and what each would cost in seconds.

A prefill worker's seconds are those until the first token: for the work that waits there, and for the prompt
without what its prefix cache has. A decode worker's are the price of a place there: how full it is, how long
its steps take, and how long the KV takes to get there. A worker that serves whole requests is charged for
both, without the transfer. LAPS groups are a term of this sum: a worker of the other group costs
``laps_overflow_s`` more, and for a long prompt also some of the time for which it blocks short ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from segue.laps.classes import PromptClass, classify
from segue.laps.cost import StepWork, prompt_seconds, seconds_of
from segue.router.choice import Ask, RoutingRules
from segue.router.fleet import (
    NOTHING_HELD,
    ONLY_COMMON,
    SAME_HOST_BYTES_S,
    FleetSnapshot,
    Held,
    WorkerView,
)

# The price, in seconds, of a place on a decode worker whose pages are all taken; it is proportional to the
# share of taken pages.
TAKEN_S = 0.1
# A request that finds too few pages waits until others have ended. This is the price, in seconds, of a place
# if as many pages are missing as the worker has.
LACKING_S = 10.0
# Each second of a long prompt on a worker of the short group costs this many seconds more, because short
# prompts wait meanwhile. `tests/router/test_decide_simulation.py`, at 70 % load, p99 of short prompts: 0.30 s
# without groups; 0.31 s with 0, because long prompts overflow as soon as there are two of them; 0.13 s with
# 3. The p99 of long prompts is 0.58 s without groups, and 0.74 s with 3.
BLOCKS = 3.0


class Candidate(NamedTuple):
    """A worker that may do a part of the request. Candidates sort by cost, then by id."""

    cost: float  # seconds; of a decode worker at least, since the transfer depends on the other worker too
    id: str
    worker: WorkerView
    hit: int  # prompt tokens that its prefix cache is expected to have
    seconds: float = 0.0  # of prefill, without the wait
    prompt_class: PromptClass | None = None
    is_outside: bool = False  # its group is the other class's
    is_whole: bool = False  # it needs no second worker


@dataclass(slots=True)
class Candidates:
    """All workers that may do a part of the request, and why others may not."""

    prefill: list[Candidate] = field(default_factory=list)  # whole ones among them
    decode: list[Candidate] = field(default_factory=list)
    local: list[Candidate] = field(default_factory=list)
    reasons: list[tuple[str, str]] = field(default_factory=list)


def find_candidates(ask: Ask, fleet: FleetSnapshot, now: float, rules: RoutingRules) -> Candidates:
    """Returns the candidates of each part, unsorted."""
    found = Candidates()
    for worker in fleet.workers:
        reason = worker.why_not(now) or _why_not(ask, worker)
        if reason is not None:
            found.reasons.append((worker.id, reason))
            continue
        record = worker.record
        held = fleet.held.get(record.worker_id, NOTHING_HELD)
        if record.role == "decode":
            found.decode.append(_decode(ask, worker, held))
            local = _local(ask, worker, held, now, rules)
            if local is not None:
                found.local.append(local)
        else:
            found.prefill.append(_prefill(ask, worker, held, now, rules))
    return found


def _why_not(ask: Ask, worker: WorkerView) -> str | None:
    """Returns why a worker cannot take this request; None: it can."""
    record = worker.record
    if record.worker_id in ask.tried:
        return "it has failed at this request"
    if ask.is_native and not worker.has_all_routes:
        return ONLY_COMMON
    if worker.is_foreign and ask.is_resumed:
        return "it is no engine of Segue: it cannot go on with a reply"
    tokens = ask.num_tokens + (1 if record.role == "prefill" else ask.max_new_tokens)
    if tokens > record.max_seq_len:
        return f"the request needs {tokens} tokens, and its context has {record.max_seq_len}"
    return None


def _prefill(ask: Ask, worker: WorkerView, held: Held, now: float, rules: RoutingRules) -> Candidate:
    """Returns a worker that would compute the prompt, and if it serves whole requests all of it."""
    hit = _hit(ask, worker)
    rest = ask.num_tokens - hit
    seconds = prompt_seconds(worker.coefficients, rest, hit)
    cost = _wait_s(worker, held, now) + seconds
    prompt_class, is_outside = None, False
    if worker.group is not None:
        prompt_class = classify(rest, hit, rules.laps_threshold, worker.coefficients)
        is_outside = prompt_class != worker.group
        if is_outside:
            cost += rules.laps_overflow_s + (BLOCKS * seconds if prompt_class == "long" else 0.0)
    is_both = worker.record.role == "both"
    if is_both:
        cost += _place_s(ask, worker, held)
    return Candidate(
        cost, worker.record.worker_id, worker, hit, seconds, prompt_class, is_outside,
        is_both or ask.max_new_tokens == 1,
    )  # fmt: skip


def _decode(ask: Ask, worker: WorkerView, held: Held) -> Candidate:
    """Returns a worker that would get the KV, with the cost of a transfer on its own host."""
    hit = _hit(ask, worker)
    cost = _place_s(ask, worker, held) + num_bytes(ask, worker, hit) / SAME_HOST_BYTES_S
    return Candidate(cost, worker.record.worker_id, worker, hit)


def _local(ask: Ask, worker: WorkerView, held: Held, now: float, rules: RoutingRules) -> Candidate | None:
    """Returns a decode worker that would compute the rest of the prompt itself; None: it should not.

    Before the first sample of its steps the rest is taken to cost nothing: else there would never be one.
    """
    hit = _hit(ask, worker)
    rest = ask.num_tokens - hit
    if not hit or rest > rules.local_prefill_tokens or worker.report is None:
        return None
    load = worker.report.load
    step = StepWork(decode_rows=load.decode_rows, decode_kv=load.decode_kv)
    growth = seconds_of(worker.coefficients, step.plus(rest, hit)) - seconds_of(worker.coefficients, step)
    if growth > rules.local_growth_s:
        return None
    seconds = prompt_seconds(worker.coefficients, rest, hit)
    cost = _wait_s(worker, held, now) + seconds + _place_s(ask, worker, held)
    return Candidate(cost, worker.record.worker_id, worker, hit, seconds)


def recomputing(ask: Ask, decode: Candidate, fleet: FleetSnapshot, now: float) -> Candidate:
    """Returns a decode worker as one that computes the prompt again, with its own weights."""
    worker = decode.worker
    held = fleet.held.get(decode.id, NOTHING_HELD)
    seconds = prompt_seconds(worker.coefficients, ask.num_tokens - decode.hit, decode.hit)
    cost = _place_s(ask, worker, held) + _wait_s(worker, held, now) + seconds
    return decode._replace(cost=cost, seconds=seconds)


def _hit(ask: Ask, worker: WorkerView) -> int:
    """Returns the prompt tokens that it is expected to have: whole pages, and never the last token."""
    hit = ask.hits.get(worker.record.worker_id, 0)
    if not hit:
        return 0
    size = worker.record.page_size
    return min(hit, ask.num_tokens - 1) // size * size


def _wait_s(worker: WorkerView, held: Held, now: float) -> float:
    """Returns the seconds until the worker begins with one more prompt."""
    return worker.queued_s(now) + held.new_us / 1e6


def _place_s(ask: Ask, worker: WorkerView, held: Held) -> float:
    """Returns the price of a place among the requests that a worker decodes, in seconds."""
    assert worker.report is not None
    load = worker.report.load
    pages = load.taken_pages + (held.new_tokens + ask.num_tokens) / worker.record.page_size
    share = pages / load.num_pages
    return TAKEN_S * share + LACKING_S * max(0.0, share - 1.0) + load.step_s


def num_bytes(ask: Ask, worker: WorkerView, hit: int) -> int:
    """Returns the bytes of KV that a decode worker lacks."""
    return (ask.num_tokens - hit) * worker.record.kv_bytes_per_token
