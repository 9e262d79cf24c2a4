"""The bar of warm KV on a GPU: a prefix of 4,096 tokens, on an engine that has taken over."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from bench.failover import model_options
from bench.warm_kv import measure

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def test_the_first_token_of_a_successor_comes_like_that_of_a_warm_engine() -> None:
    with ExitStack() as stack:
        options = [*model_options("0.6b", stack), "--device", "cuda", "--num-kv-tokens", str(1 << 18)]
        figures = measure(options, kills=3, prefix=4096)
    print(figures)
    for name, (value, bar, holds) in figures["bars"].items():
        assert holds, f"{name}: {value:.3f}, with a bar of {bar:g}; {figures}"
