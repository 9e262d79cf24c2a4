"""The groups that the ranks are joining, at most a few at a time, and the calls that wait for each."""

from __future__ import annotations

from dataclasses import dataclass, field

from segue.messages.weight_operations import Group

MAX_JOINS = 4
_GRACE_S = 1.0  # the ranks have the same deadline and know more, so their error is to come first


@dataclass(slots=True, eq=False)
class Joining:
    """The joining of one group, until every rank has replied."""

    group: Group
    waiting: dict[int, tuple[float, float]] = field(default_factory=dict)  # call -> deadline, its timeout_s
    is_stopped: bool = False  # no call waits for it any more, and the ranks got a ``StopJoin``


class GroupJoins:
    """The joins that are in progress."""

    def __init__(self) -> None:
        self._open: list[Joining] = []

    def wait(self, call: int, group: Group, timeout_s: float, now: float) -> Joining | None:
        """Let a call wait for ``group``; returns a new join for the ranks, or None if one is in progress."""
        joining = next((each for each in self._open if each.group == group and not each.is_stopped), None)
        is_new = joining is None
        if joining is None:
            joining = Joining(group)
            self._open.append(joining)
        joining.waiting[call] = now + timeout_s + _GRACE_S, timeout_s
        return joining if is_new else None

    def refusal(self, group: Group) -> str | None:
        """Why ``group`` cannot be joined now: too many other joins are in progress; None: it can."""
        others = [each.group for each in self._open if each.group.name != group.name or each.is_stopped]
        known = any(each.group == group and not each.is_stopped for each in self._open)
        if known or len(others) < MAX_JOINS:
            return None
        named = "; ".join(f"{each.name!r} at {each.master_address}:{each.master_port}" for each in others)
        return f"{len(others)} groups are being joined ({named}); the limit is {MAX_JOINS}; retry later"

    def end(self, joining: Joining) -> list[int]:
        """Remove a join to which every rank has replied; returns the calls that still wait for it."""
        self._open.remove(joining)
        return list(joining.waiting)

    def withdraw(self, call: int) -> None:
        """Remove a call whose client has gone; nothing happens if it does not wait for a join."""
        for joining in self._open:
            joining.waiting.pop(call, None)

    def expire(self, now: float) -> list[tuple[int, str]]:
        """Remove the calls whose deadline is over; returns each with its error text."""
        expired = []
        for joining in self._open:
            for call, (deadline, timeout_s) in list(joining.waiting.items()):
                if now >= deadline:
                    del joining.waiting[call]
                    expired.append((call, f"group {joining.group.name!r} was not met within {timeout_s:g} s"))
        return expired

    def stop_unwanted(self) -> list[Group]:
        """Mark the joins that no call waits for any more as stopped; returns their groups, each only once."""
        unwanted = [each for each in self._open if not each.waiting and not each.is_stopped]
        for joining in unwanted:
            joining.is_stopped = True
        return [joining.group for joining in unwanted]

    @property
    def next_deadline(self) -> float | None:
        """When the first waiting call expires; None if no call waits."""
        return min((at for each in self._open for at, _ in each.waiting.values()), default=None)
