"""What `bench.first_minute` says of its bars; the starts need a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.first_minute import StartTimeline, missed
from segue.launch.runtime import Runtime
from segue.messages.control import StartStep
from tests.support.fake_engine import FakeEngine


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


@pytest.mark.parametrize("module", ["first_minute", "offline"])
def test_before_the_engine_starts_nothing_is_imported_that_it_does_not_need(module: str) -> None:
    code = f"import bench.{module}, sys; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "transformers"} & {*output.split()}


def test_the_timeline_has_the_parts_of_a_start_in_order(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runtime, "_receive", Runtime._receive)  # and so is put back at the end
    timeline = StartTimeline()
    with FakeEngine(str(tiny_model), load_format="dummy", log_level="error") as engine:
        timeline.end(engine)
    assert [*timeline.sorted()] == ["imported", "worker began", "worker imported", "ready"]


def test_the_timeline_has_the_steps_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[Any] = []
    monkeypatch.setattr(Runtime, "_receive", lambda _, message: received.append(message))
    timeline: Any = StartTimeline()
    steps = [StartStep(rank, name, 1, 2) for rank, name in ((0, "device"), (1, "other"), (0, "weights"))]
    for step in steps:
        Runtime._receive(object(), step)  # type: ignore[arg-type]
    assert [*timeline.sorted()] == ["imported", "worker imported", "device", "weights"]
    assert received == steps
