"""Which workers get a request: those that are predicted to take the fewest seconds for it.

Two workers that hand over KV are chosen together or not at all. Everything is pure: the same inputs give the
same decision, and of equal sums the one with the smaller ids wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from random import Random

from segue.router.candidates import Candidate, Candidates, find_candidates, num_bytes, recomputing
from segue.router.choice import Ask, Decision, Local, Pair, Refuse, RoutingPolicy, RoutingRules, Whole
from segue.router.fleet import SAME_HOST_BYTES_S, Assignment, FleetSnapshot, WorkerView


def decide(ask: Ask, fleet: FleetSnapshot, now: float, rules: RoutingRules, random: Random) -> Decision:
    """Choose the workers of a request.

    Workers with the same weights are paired. Only if nothing else is possible, the decode worker may have
    other weights: then it computes the KV again. If there is no pair at all, a request of which the client
    has a part goes on at a decode worker alone.

    Args:
        ask: the request.
        fleet: the workers at this moment.
        now: the time, of the clock of the snapshot.
        rules: the options.
        random: draws the workers of ``power_of_two``.
    """
    found = find_candidates(ask, fleet, now, rules)
    prefill = _narrowed(found.prefill, found.decode, ask, rules, random, same_weights=True)
    alone = [c for c in prefill if c.is_whole]
    if rules.prefill_policy == "cost":
        alone += found.local
    best = min(alone, default=None)
    decode = _decode_narrowed(prefill, found.decode, ask, rules, random, same_weights=True)
    pair = _best_pair(ask, prefill, decode, best.cost if best else inf)
    if pair is not None:
        return pair
    if best is not None:
        return (Whole if best.is_whole else Local)(seconds=best.cost, assignment=_assignment(ask, best))
    again = [recomputing(ask, each, fleet, now) for each in found.decode]
    prefill = _narrowed(found.prefill, again, ask, rules, random, same_weights=False)
    decode = _decode_narrowed(prefill, again, ask, rules, random, same_weights=False)
    pair = _best_pair(ask, prefill, decode, inf, recompute=True)
    if pair is not None:
        return pair
    if ask.is_resumed and again:
        alone_here = min(again)
        return Local(seconds=alone_here.cost, assignment=_assignment(ask, alone_here))
    return _refusal(found)


def second_claim(
    ask: Ask, prefill: str, fleet: FleetSnapshot, now: float, rules: RoutingRules, random: Random
) -> Assignment | None:
    """Choose another decode worker for KV that the worker ``prefill`` still offers; None: there is none."""
    found = find_candidates(ask, fleet, now, rules)
    offering = [
        Candidate(0.0, worker.id, worker, 0)
        for worker in fleet.workers
        if worker.id == prefill and worker.connected
    ]
    narrowed = _decode_narrowed(offering, found.decode, ask, rules, random, same_weights=True)
    able = [each for each in narrowed if any(_joined(p, each, True) for p in offering)]
    return _assignment(ask, min(able)) if able else None


def _narrowed(
    prefill: list[Candidate],
    decode: Sequence[Candidate],
    ask: Ask,
    rules: RoutingRules,
    random: Random,
    *,
    same_weights: bool,
) -> list[Candidate]:
    """Returns the prefill workers that the policy leaves: all of them by cost, else at most one."""
    if rules.prefill_policy == "cost":
        return prefill
    able = [p for p in prefill if p.is_whole or any(_joined(p, d, same_weights) for d in decode)]
    outside = [p for p in able if p.is_outside]
    inside = [p for p in able if not p.is_outside]
    if outside and inside:
        able = inside if min(inside).cost <= min(outside).cost else outside
    return _drawn(able, rules.prefill_policy, ask, random)


def _decode_narrowed(
    prefill: Sequence[Candidate],
    decode: list[Candidate],
    ask: Ask,
    rules: RoutingRules,
    random: Random,
    *,
    same_weights: bool,
) -> list[Candidate]:
    """Returns the decode workers that the policy leaves: all of them by cost, else at most one.

    That one can be paired with one of ``prefill``, if any can.
    """
    if rules.decode_policy == "cost":
        return decode
    able = [d for d in decode if any(not p.is_whole and _joined(p, d, same_weights) for p in prefill)]
    return _drawn(able, rules.decode_policy, ask, random)


def _drawn(able: list[Candidate], policy: RoutingPolicy, ask: Ask, random: Random) -> list[Candidate]:
    """Returns the one that a policy other than ``cost`` takes, or none if there are none."""
    if not able:
        return []
    able = sorted(able, key=lambda candidate: candidate.id)
    if policy == "round_robin":
        return [able[ask.number % len(able)]]
    return [min(random.sample(able, min(2, len(able))))]


def _joined(prefill: Candidate, decode: Candidate, same_weights: bool) -> bool:
    """Whether the two can be a pair."""
    first, second = prefill.worker, decode.worker
    name = _kv_kind if same_weights else _model
    hands_over = bool(first.record.kv_address) and first.record.kv_address not in second.refused
    return hands_over and name(first) == name(second)


def _kv_kind(worker: WorkerView) -> tuple[str, ...]:
    return worker.kv_kind


def _model(worker: WorkerView) -> tuple[str, str]:
    return worker.record.model, worker.record.tokenizer


def _best_pair(
    ask: Ask,
    prefill: Sequence[Candidate],
    decode: Sequence[Candidate],
    below: float,
    *,
    recompute: bool = False,
) -> Pair | None:
    """Returns the pair that costs least, if it costs less than ``below``.

    Both sides are walked from the cheapest on, as long as a pair can still be cheaper than the best one so
    far: 32 times 32 workers are rarely more than a few pairs.
    """
    best: tuple[Candidate, Candidate] | None = None
    by_cost = sorted(decode)
    for first in sorted(c for c in prefill if not c.is_whole):
        for second in by_cost:
            if first.cost + second.cost >= below:
                break
            if not _joined(first, second, not recompute):
                continue
            cost = first.cost + second.cost
            if not recompute:
                cost += _transfer_excess_s(ask, first, second)
            if cost < below:
                best, below = (first, second), cost
    if best is None:
        return None
    return Pair(
        seconds=below,
        prefill=_assignment(ask, best[0]),
        decode=_assignment(ask, best[1]),
        recompute=recompute,
    )


def _transfer_excess_s(ask: Ask, prefill: Candidate, decode: Candidate) -> float:
    """Returns the seconds by which the transfer takes longer than from a worker on the same host."""
    worker = decode.worker
    rate = worker.bytes_per_s_from(prefill.worker)
    return num_bytes(ask, worker, decode.hit) * (1 / rate - 1 / SAME_HOST_BYTES_S)


def _assignment(ask: Ask, candidate: Candidate) -> Assignment:
    return Assignment(
        worker=candidate.worker,
        seconds=candidate.seconds,
        num_tokens=ask.num_tokens,
        hit=candidate.hit,
        prompt_class=candidate.prompt_class,
    )


def _refusal(found: Candidates) -> Refuse:
    """Returns why there is no choice."""
    if found.prefill and found.decode:
        return Refuse(
            problem="no prefill worker can hand KV to a decode worker",
            reasons=[*_pair_reasons(found), *found.reasons],
        )
    if found.prefill:
        problem = "no decode worker can take the KV of a prefill worker"
    elif found.decode:
        problem = "no prefill worker can compute the prompt"
    elif found.reasons:
        problem = "no worker can take the request"
    else:
        problem = "no worker is registered"
    return Refuse(problem=problem, reasons=found.reasons)


def _pair_reasons(found: Candidates) -> list[tuple[str, str]]:
    reasons = []
    for prefill in found.prefill:
        for decode in found.decode:
            reason = decode.worker.refused.get(prefill.worker.record.kv_address, "")
            if not prefill.worker.record.kv_address:
                reason = f"{prefill.id} has no address where it hands over KV"
            if _model(prefill.worker) != _model(decode.worker):
                reason = "they serve different models"
            reasons.append((f"{prefill.id} -> {decode.id}", reason))
    return reasons
