"""What `bench.first_minute` says of its bars; the starts need a GPU."""

from __future__ import annotations

from typing import Any

from bench.first_minute import missed


def start(**changes: Any) -> dict[str, Any]:
    return {"ready, s": 7.5, "first of third": 0.98, "compiled behind ready": 0} | changes


def test_each_bar_that_is_missed_is_named() -> None:
    assert missed({"cold": start(**{"ready, s": 24.0}), "warm": start()}) == []
    wrong = missed(
        {
            "cold": start(**{"first of third": 0.83, "compiled behind ready": 2}),
            "warm": start(**{"ready, s": 9.0}),
        }
    )
    assert [text.partition(":")[0] for text in wrong] == ["cold", "cold", "warm"]
    assert "83.0%" in wrong[0] and "2 kernels" in wrong[1] and "9.0 s" in wrong[2]
