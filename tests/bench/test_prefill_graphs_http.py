"""Prompts behind a cached history over HTTP, on a tiny model and a CPU."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from bench.launch import served
from bench.model_dir import with_tokenizer
from bench.prefill_graphs_http import Target, measure, ratios
from segue.bench.load import Clients, LogNormal, Mixture
from segue.bench.serving import model_of
from tests.model_runner import tiny

TINY = Mixture(
    long_share=0.3,
    short=LogNormal(median=4, sigma=0.5, least=1, most=10),
    long=LogNormal(median=40, sigma=0.2, least=20, most=60),
    max_id=300,
)


def test_a_served_engine_finds_the_history_in_its_cache_and_counts_its_steps(tmp_path: Path) -> None:
    tiny.save_llama(tmp_path)
    options = ["--device", "cpu", "--load-format", "dummy", "--num-kv-tokens", "4096"]
    with (
        with_tokenizer(tmp_path) as path,
        served("--model", str(path), *options) as url,
        Clients(url, model_of(url), 1) as clients,
    ):
        rows = measure({"ragged": Target(url=url, clients=clients)}, TINY, (0, 128), seconds=0.4, repeats=1)
    assert [(row["history"], row["mode"]) for row in rows] == [(0, "ragged"), (128, "ragged")]
    for row in rows:
        assert 0 < row["short p50"] <= row["short p99"] and row["long p50"] > 0
        assert row["requests_per_s"] > 0 and row["steps"]["disabled"] > 0
        mean_fresh = 0.7 * 4 + 0.3 * 40
        expected = row["history"] / (row["history"] + mean_fresh)
        assert row["cached_share"] == pytest.approx(expected, abs=0.1)


def test_the_option_is_compared_with_the_better_of_the_others() -> None:
    times = {"ragged": 4.0, "grid": 4.4, "grid alone": 5.0}
    rows = [{"history": 512, "mode": mode, "short p50": time} for mode, time in times.items()]
    assert ratios(rows) == {512: pytest.approx(1.1)}


def test_every_prompt_of_a_mixture_begins_with_one_of_the_prefixes() -> None:
    prefixes = [[1] * 5, [2] * 5]
    rng, mixture = random.Random(0), replace(TINY, prefixes=prefixes)
    prompts = [list(mixture.job(rng).prompt) for _ in range(50)]
    assert {tuple(prompt[:5]) for prompt in prompts} == {tuple(prefix) for prefix in prefixes}
    assert all(len(prompt) > 5 for prompt in prompts)
