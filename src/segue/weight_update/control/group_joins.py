"""Which groups the ranks are joining, and which calls wait for each; no more than a few at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

from segue.messages.weight_operations import Group

MAX_JOINS = 4
_GRACE_S = 1.0  # the ranks know the deadline too, and can say more


@dataclass(slots=True, eq=False)
class Joining:
    """One group, until every rank has answered."""

    group: Group
    waiting: dict[int, tuple[float, float]] = field(default_factory=dict)  # call -> deadline, its timeout_s
    is_stopped: bool = False  # nobody waits any more, and the ranks know


class GroupJoins:
    """All that are under way."""

    def __init__(self) -> None:
        self._open: list[Joining] = []

    def wait(self, call: int, group: Group, timeout_s: float, now: float) -> Joining | None:
        """Note that a call waits for ``group``; what the ranks have to be told of, unless they know of it."""
        joining = next((each for each in self._open if each.group == group and not each.is_stopped), None)
        is_new = joining is None
        if joining is None:
            joining = Joining(group)
            self._open.append(joining)
        joining.waiting[call] = now + timeout_s + _GRACE_S, timeout_s
        return joining if is_new else None

    def refusal(self, group: Group) -> str | None:
        """Why ``group`` cannot be joined now: one of other groups is to end first."""
        others = [each.group for each in self._open if each.group.name != group.name or each.is_stopped]
        known = any(each.group == group and not each.is_stopped for each in self._open)
        if known or len(others) < MAX_JOINS:
            return None
        named = "; ".join(f"{each.name!r} at {each.master_address}:{each.master_port}" for each in others)
        return f"{len(others)} groups are being joined ({named}), the limit is {MAX_JOINS}; retry later"

    def end(self, joining: Joining) -> list[int]:
        """Every rank has answered; the calls that still wait."""
        self._open.remove(joining)
        return list(joining.waiting)

    def withdraw(self, call: int) -> None:
        """Nobody waits for the answer of this call, which need not be one of ours."""
        for joining in self._open:
            joining.waiting.pop(call, None)

    def expire(self, now: float) -> list[tuple[int, str]]:
        """The calls whose time is over, each with what is said to it."""
        expired = []
        for joining in self._open:
            for call, (deadline, timeout_s) in list(joining.waiting.items()):
                if now >= deadline:
                    del joining.waiting[call]
                    expired.append((call, f"group {joining.group.name!r} was not met within {timeout_s:g} s"))
        return expired

    def stop_unwanted(self) -> list[Group]:
        """The groups that nobody waits for any more, each once."""
        unwanted = [each for each in self._open if not each.waiting and not each.is_stopped]
        for joining in unwanted:
            joining.is_stopped = True
        return [joining.group for joining in unwanted]

    @property
    def next_deadline(self) -> float | None:
        """When :meth:`expire` has something to give; None: never."""
        return min((at for each in self._open for at, _ in each.waiting.values()), default=None)
