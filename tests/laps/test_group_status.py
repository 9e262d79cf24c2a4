"""What ``/laps_status`` shows."""

from __future__ import annotations

from typing import Any

import msgspec

from segue.laps.group_status import GroupMember, status
from segue.laps.groups import PrefillGroups, Pressure, RebalanceRules, rebalance, split

RULES = RebalanceRules()
MEMBERS = {
    name: GroupMember(url=f"http://{name}", role="prefill", in_flight=1, queued_s=0.5, breaker="closed")
    for name in "abc"
}


def shown(groups: PrefillGroups, now: float) -> dict[str, Any]:
    pending = {"short": 3, "long": 4}
    body = status(
        groups, RULES, threshold=256, workers=MEMBERS, pending=pending, now=now, unix_now=1000.0 + now
    )
    return dict(msgspec.json.decode(msgspec.json.encode(body)))


def test_it_has_the_groups_what_is_pending_and_the_options() -> None:
    body = shown(split("abc", RULES, 0.0), 1.0)
    member = {"role": "prefill", "in_flight": 1, "queued_s": 0.5, "breaker": "closed"}
    assert body == {
        "enabled": True,
        "threshold": 256,
        "short_group": ["http://a"],
        "long_group": ["http://b", "http://c"],
        "short_pending": 3,
        "long_pending": 4,
        "short_group_indices": [0],
        "long_group_indices": [1, 2],
        "rebalance_interval_s": 5.0,
        "rebalance_ratio": 2.0,
        "moves": 0,
        "last_move": None,
        "cooldown_remaining_s": 4.0,
        "workers": {
            "a": member | {"url": "http://a", "class": "short"},
            "b": member | {"url": "http://b", "class": "long"},
            "c": member | {"url": "http://c", "class": "long"},
        },
    }


def test_the_last_move_has_the_time_of_day_and_a_reason() -> None:
    groups, pressure = split("abc", RULES, 0.0), Pressure()
    pressure.note("a", 2.0, 0.0)
    for now in (6.0, 7.0):
        groups = rebalance(groups, pressure, RULES, now)
    body = shown(groups, 9.0)
    assert body["moves"] == 1 and body["cooldown_remaining_s"] == 3.0
    assert body["last_move"] == {
        "at": 1007.0,
        "worker": "b",
        "from": "long",
        "to": "short",
        "reason": "the short group had 2.00 s of prompts waiting, the long group 0.00 s",
    }


def test_without_groups_it_says_why() -> None:
    body = shown(split("a", RULES, 0.0), 1.0)
    assert set(body) == {"enabled", "reason"} and body["enabled"] is False
    assert "groups need at least 2 prefill workers" in body["reason"]
