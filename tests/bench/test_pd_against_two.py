"""A pair of engines is compared with two that do both: real engines and routers, and a short load."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from bench import pd_against_two
from bench.pd_against_two import PAIR, TWO
from segue.bench.load import Lengths, LogNormal, Mixture
from tests.support.tiny_model import write_model

LOADS: dict[str, Lengths | Mixture] = {
    "mixture": Mixture(
        long_share=0.4,
        short=LogNormal(median=4, sigma=0.5, least=1, most=8),
        long=LogNormal(median=60, sigma=0.3, least=40, most=90),
        output=(4, 6),
        max_id=90,
    )
}
OPTIONS = ["--device=cpu", "--num-kv-tokens=2048", "--max-running-requests=8", "--load-format=dummy"]


@pytest.mark.slow
@pytest.mark.timeout(300)  # four engines and two routers start
def test_both_arms_serve_the_same_load_and_the_pair_adopts_all_kv(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = argparse.Namespace(
        gpus=0,
        loads=LOADS,
        only=None,
        processes=1,
        load=0.5,
        repeats=1,
        seconds=1.5,
        saturate_seconds=1.0,
        concurrency=2,
    )
    model = write_model(tmp_path / "tiny-model")
    found = pd_against_two.measure(args, [*OPTIONS, f"--model={model}"], tmp_path)
    assert pd_against_two.is_sound(found)
    load = found["mixture"]
    (two,), (pair,) = load["runs"][TWO], load["runs"][PAIR]
    assert two["requests"] == pair["requests"] > 0
    assert two["failed"] == pair["failed"] == 0
    assert load["handover"]["num_adopted"] >= pair["requests"]
    assert load["rate"] == 0.5 * min(load["saturation_per_s"].values()) > 0
    pd_against_two.show(found)
    shown = capsys.readouterr().out
    assert "mixture short" in shown and "mixture long" in shown


def run(gap_p99: float, *, long_gap_p99: float = 0.0) -> dict[str, Any]:
    """The summary of a run, of which only the gaps' p99 differs."""

    def times(p99: float) -> dict[str, Any]:
        return {"gap_s": {"p50": 0.01, "p99": p99}, "ttft_s": {"p50": 0.1, "p99": 0.2}}

    return times(gap_p99) | {"classes": {"short": times(gap_p99), "long": times(long_gap_p99)}}


def test_figures_are_medians_of_the_repeats_in_milliseconds() -> None:
    runs = [run(0.02, long_gap_p99=0.5), run(0.03, long_gap_p99=0.7), run(0.9, long_gap_p99=0.6)]
    expected = {"gap p50": 10.0, "gap p99": 30.0, "TTFT p50": 100.0, "TTFT p99": 200.0}
    assert pd_against_two.medians(runs) == pytest.approx(expected)
    assert pd_against_two.medians(runs, "long")["gap p99"] == pytest.approx(600)


def test_the_pair_is_judged_by_its_gaps_and_by_adopted_kv() -> None:
    load = {
        "runs": {TWO: [run(0.1)], PAIR: [run(0.04)]},
        "handover": {"num_adopted": 9, "recomputed": {}, "failed": {}},
    }
    assert pd_against_two.judged({"1k": load}) == {"1k": pytest.approx(0.4)}
    assert pd_against_two.is_sound({"1k": load})
    for key in ("recomputed", "failed"):
        unsound = load | {"handover": {"num_adopted": 9, "recomputed": {}, "failed": {}, key: {"gone": 1}}}
        assert not pd_against_two.is_sound({"1k": unsound})
