"""What ``/laps_status`` shows of the groups of prefill workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from segue.laps.classes import PromptClass
from segue.laps.groups import GroupMove, PrefillGroups, RebalanceRules


class GroupMember(msgspec.Struct, frozen=True, kw_only=True):
    """One prefill worker in :class:`LapsStatus`."""

    url: str
    role: str
    class_: PromptClass | None = msgspec.field(name="class", default=None)  # its group, set by `status`
    in_flight: int  # requests
    queued_s: float  # predicted seconds of its waiting prompts
    breaker: str  # the state of its circuit breaker


class LapsOff(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``/laps_status`` when there are no groups."""

    enabled: Literal[False] = False
    reason: str


class LapsStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``/laps_status``."""

    enabled: Literal[True] = True
    threshold: int  # tokens of the longest short prompt
    short_group: list[str]  # URLs
    long_group: list[str]
    short_pending: int  # requests in flight whose prompts are short
    long_pending: int
    short_group_indices: list[int]  # of the workers, in the order of `workers`
    long_group_indices: list[int]
    rebalance_interval_s: float
    rebalance_ratio: float
    moves: int
    last_move: GroupMove | None
    cooldown_remaining_s: float
    workers: dict[str, GroupMember]  # by id, in the order in which they were registered


def status(
    groups: PrefillGroups,
    rules: RebalanceRules,
    *,
    threshold: int,
    workers: Mapping[str, GroupMember],
    pending: Mapping[PromptClass, int],
    now: float,
    unix_now: float,
) -> LapsStatus | LapsOff:
    """Returns the body of ``/laps_status``.

    Args:
        groups: as they are.
        rules: the options.
        threshold: tokens of the longest short prompt.
        workers: all prefill workers by id, in the order in which they were registered.
        pending: requests in flight whose prompts are short, or long.
        now: the time, of the clock of ``groups``.
        unix_now: the same moment in seconds since 1970, for people.
    """
    if groups.off:
        return LapsOff(reason=groups.off)
    indices = {worker: index for index, worker in enumerate(workers)}
    move = groups.last_move
    return LapsStatus(
        threshold=threshold,
        short_group=[workers[worker].url for worker in groups.short],
        long_group=[workers[worker].url for worker in groups.long],
        short_pending=pending["short"],
        long_pending=pending["long"],
        short_group_indices=[indices[worker] for worker in groups.short],
        long_group_indices=[indices[worker] for worker in groups.long],
        rebalance_interval_s=rules.interval_s,
        rebalance_ratio=rules.ratio,
        moves=groups.num_moves,
        last_move=move and msgspec.structs.replace(move, at=unix_now - (now - move.at)),
        cooldown_remaining_s=max(0.0, groups.rests_until - now),
        workers={
            worker: msgspec.structs.replace(member, class_=groups.of(worker))
            for worker, member in workers.items()
        },
    )
