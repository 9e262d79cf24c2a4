"""Groups of prefill workers: one for short prompts and one for long ones, whose sizes follow the load.

A router prefers the workers of a prompt's group, so that short prompts do not wait behind long ones. Workers
move from one group to the other, one at a time, when one group has much more to do. Each worker is named by
its id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, inf

import msgspec

from segue.laps.classes import PromptClass

MEMORY_S = 1.0  # a queue that was measured this long ago counts 1/e of a new one
QUANTILE = 0.9  # of the queues of a group's workers: its pressure
PRESSED_S = 0.05  # a group with less pressure needs no further worker, whatever the other one has
CHECK_S = 1.0  # seconds between two checks: after this time most of a pressure is new
FEWEST = 2  # prefill workers that can be in groups


class Pressure:
    """How much work waits on each worker: its queued seconds, averaged over about one second."""

    def __init__(self) -> None:
        self._queues: dict[str, tuple[float, float]] = {}  # worker -> average, and when it was updated

    def note(self, worker: str, queued_s: float, now: float) -> None:
        """Take a worker's predicted seconds of waiting prompts."""
        average, at = self._queues.get(worker, (queued_s, now))
        average += (queued_s - average) * (1 - exp((at - now) / MEMORY_S))
        self._queues[worker] = average, now

    def forget(self, worker: str) -> None:
        """Forget a worker that has left."""
        self._queues.pop(worker, None)

    def of(self, worker: str) -> float:
        """Returns a worker's average; 0 for one that has not reported."""
        return self._queues.get(worker, (0.0, 0.0))[0]

    def of_group(self, workers: Iterable[str]) -> float:
        """Returns the 90 % quantile over a group, interpolated between neighbours; 0 for an empty group.

        With one worker it is that worker's average; with two, 0.9 of the larger and 0.1 of the smaller one.
        So with few workers it is near the most loaded one's, and becomes less when an idle one joins them.
        """
        averages = sorted(map(self.of, workers))
        if not averages:
            return 0.0
        low, part = divmod(QUANTILE * (len(averages) - 1), 1)
        below, above = averages[int(low)], averages[min(int(low) + 1, len(averages) - 1)]
        return below + part * (above - below)


class GroupMove(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's move from one group to the other."""

    at: float
    worker: str
    from_: PromptClass = msgspec.field(name="from")
    to: PromptClass
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceRules:
    """When a worker moves."""

    ratio: float = 2.0  # --laps-rebalance-ratio: between the pressures of the groups
    interval_s: float = 5.0  # --laps-rebalance-interval-s: seconds between two moves, at least

    @property
    def check_s(self) -> float:
        """Seconds between two checks; at least two fit into the interval."""
        return min(CHECK_S, self.interval_s / 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillGroups:
    """The groups, each with at least one worker; or none, and why. Times are monotonic, in seconds."""

    short: tuple[str, ...] = ()
    long: tuple[str, ...] = ()
    off: str = ""  # why there are no groups; "": there are
    num_moves: int = 0
    last_move: GroupMove | None = None
    rests_until: float = -inf  # no worker moves before
    check_at: float = -inf  # no check before
    pressed: PromptClass | None = None  # the group that had too much to do at the last check

    def members(self, group: PromptClass) -> tuple[str, ...]:
        """Returns the workers of a group."""
        return self.short if group == "short" else self.long

    def of(self, worker: str) -> PromptClass | None:
        """Returns the group of a worker; None: it is in none."""
        return "short" if worker in self.short else "long" if worker in self.long else None


def other(group: PromptClass) -> PromptClass:
    """Returns the other group."""
    return "long" if group == "short" else "short"


def split(workers: Sequence[str], rules: RebalanceRules, now: float) -> PrefillGroups:
    """Returns new groups: the first half of the workers for short prompts, the others for long ones."""
    half = len(workers) // 2
    if len(workers) < FEWEST:
        have = f"there is only {workers[0]}" if workers else "there is none"
        return PrefillGroups(
            off=f"groups need at least {FEWEST} prefill workers, and {have}: add one, and they begin"
        )
    rests_until = now + rules.interval_s
    return PrefillGroups(short=tuple(workers[:half]), long=tuple(workers[half:]), rests_until=rests_until)


def follow(
    groups: PrefillGroups, workers: Sequence[str], pressure: Pressure, rules: RebalanceRules, now: float
) -> PrefillGroups:
    """Returns the groups once workers have joined or left.

    A worker that joins goes to the group that has too much to do, else to the smaller one, else to the one
    of long prompts. If the last worker of a group leaves, the least loaded one of the other group takes its
    place at once.

    Args:
        groups: as they were.
        workers: all prefill workers that are there now, in the order in which they were registered.
        pressure: their queues.
        rules: when a group has too much to do.
        now: the time.
    """
    if groups.off or len(workers) < FEWEST:
        fresh = split(workers, rules, now)
        return replace(fresh, num_moves=groups.num_moves, last_move=groups.last_move)
    present = set(workers)
    if present == {*groups.short, *groups.long}:
        return groups
    groups = replace(
        groups,
        short=tuple(w for w in groups.short if w in present),
        long=tuple(w for w in groups.long if w in present),
    )
    for worker in workers:
        if groups.of(worker) is None:
            smaller: PromptClass = "short" if len(groups.short) < len(groups.long) else "long"
            groups = _with_member(groups, worker, _pressed(groups, pressure, rules) or smaller)
    for group in ("short", "long"):
        if not groups.members(group):
            groups = _moved(groups, group, pressure, rules, now, f"the {group} group was empty")
    return groups


def rebalance(groups: PrefillGroups, pressure: Pressure, rules: RebalanceRules, now: float) -> PrefillGroups:
    """Returns the groups after a check; one worker has moved if a group has had too much to do for a while.

    A group has too much to do if its pressure exceeds ``ratio`` times the other's. If two checks in a row
    find this, the least loaded worker of the other group moves, unless it is the last one there, or the last
    move was less than ``interval_s`` ago. Call it as often as you like.
    """
    if groups.off or now < groups.check_at:
        return groups
    pressed = _pressed(groups, pressure, rules)
    again = pressed == groups.pressed
    groups = replace(groups, check_at=now + rules.check_s, pressed=pressed)
    if pressed is None or not again or now < groups.rests_until or len(groups.members(other(pressed))) == 1:
        return groups
    much, little = (pressure.of_group(groups.members(group)) for group in (pressed, other(pressed)))
    reason = (
        f"the {pressed} group had {much:.2f} s of prompts waiting, the {other(pressed)} group {little:.2f} s"
    )
    return _moved(groups, pressed, pressure, rules, now, reason)


def _pressed(groups: PrefillGroups, pressure: Pressure, rules: RebalanceRules) -> PromptClass | None:
    """Returns the group that has too much to do; None: there is none."""
    short, long = pressure.of_group(groups.short), pressure.of_group(groups.long)
    if short >= PRESSED_S and short > rules.ratio * long:
        return "short"
    return "long" if long >= PRESSED_S and long > rules.ratio * short else None


def _moved(
    groups: PrefillGroups,
    to: PromptClass,
    pressure: Pressure,
    rules: RebalanceRules,
    now: float,
    reason: str,
) -> PrefillGroups:
    """Returns the groups with the least loaded worker of the other group moved ``to`` this one."""
    donors = groups.members(other(to))
    worker = min(donors, key=lambda worker: (pressure.of(worker), worker))
    left = tuple(each for each in donors if each != worker)
    groups = replace(groups, long=left) if to == "short" else replace(groups, short=left)
    move = GroupMove(at=now, worker=worker, from_=other(to), to=to, reason=reason)
    return replace(
        _with_member(groups, worker, to),
        num_moves=groups.num_moves + 1,
        last_move=move,
        rests_until=now + rules.interval_s,
        pressed=None,
    )


def _with_member(groups: PrefillGroups, worker: str, group: PromptClass) -> PrefillGroups:
    if group == "short":
        return replace(groups, short=(*groups.short, worker))
    return replace(groups, long=(*groups.long, worker))
