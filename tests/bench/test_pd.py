"""Figures of handing over are those of the right phases, and are held to their bars."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from bench import pd, pd_pushes
from bench.pd_pair import OUTPUTS, started
from segue.kvcache.pool import KVShape
from tests.support.tiny_model import CONFIG


def test_percentiles_are_in_milliseconds() -> None:
    assert pd.percentiles([0.001 * value for value in range(1, 101)]) == {
        "p50_ms": 50.5,
        "p99_ms": 100.0,
        "count": 100,
    }


def test_intervals_are_those_within_a_phase() -> None:
    timeline = SimpleNamespace(times=[0.5, 1.0, 1.1, 1.3, 2.0, 2.5])
    connection: Any = SimpleNamespace(timeline=lambda: timeline)
    spans = [("alone", 0.9, 1.4), ("handing over", 1.4, 3.0)]
    assert pd.intervals([connection], spans, "alone") == pytest.approx([0.1, 0.2])
    assert pd.intervals([connection], spans, "handing over") == pytest.approx([0.5])


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [("pause p50, ms", 4.9, 5.1), ("push of 64 MiB, GB/s", 201.0, 199.0), ("streams, %", -3.0, 5.1)],
)
def test_a_bar_is_a_limit_in_the_right_direction(name: str, good: float, bad: float) -> None:
    assert pd.kept(name, good) and not pd.kept(name, bad)


def test_all_pages_of_a_push_are_copied_before_it_counts_as_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pd_pushes, "SIZES", (1 << 16, 1 << 26))
    shape = KVShape(
        num_pages=1 << 10, num_layers=2, page_size=4, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16
    )
    found = pd_pushes.pushes(shape, "cpu", "cpu")
    assert [each["pages"] for each in found.values()] == [(1 << 16) // shape.page_bytes, shape.num_pages]
    assert all(each["GB/s"] > 0 for each in found.values())


@pytest.mark.timeout(180)  # two engines start
def test_the_way_of_one_request_through_a_real_pair_is_drawn(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 10_000}))
    options = ["--load-format=dummy", "--chunked-prefill-size=32"]
    with ExitStack() as stack:
        given = argparse.Namespace(gpus=0, model=str(model), option=options)
        pair = stack.enter_context(started(0, pd.engine_options(given, stack), tmp_path))
        shown = pd.picture(pair, 100, tmp_path / "drawn.svg", "tiny").splitlines()
    rows = {line.partition("|")[0].strip(): line.rpartition("|")[2] for line in shown}
    assert "100 tokens in 4 chunks" in rows["prefill engine: prompt"]
    assert rows["decode engine: tokens"].startswith(f" 2 to {OUTPUTS}, ")
    assert "adopted" in rows["decode engine: waits"]
    picture = ElementTree.parse(tmp_path / "drawn.svg").getroot()
    texts = [each.text for each in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert set(rows) <= set(texts) and "tiny: one prompt of 100 tokens" in texts
