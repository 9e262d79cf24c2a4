"""With ``--pd-checksum``, KV that was damaged on its way is not used."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from segue.disagg.transports import shm
from tests.e2e.test_handover import Pair, greedy, ids


@pytest.fixture(scope="module", params=[(1, 1), (2, 1)], ids=["tp 1 to 1", "tp 2 to 1"])
def pair(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(tiny_model, tp=request.param, pd_checksum=True)
    yield pair
    pair.close()


def test_kv_that_arrives_whole_is_adopted(pair: Pair) -> None:
    for count in (3, 30, 100):
        pair.compare(input_ids=ids(count, seed=count), sampling_params=greedy(), return_logprob=False)
        assert pair.num_adopted == 1


def test_a_flipped_bit_is_found_and_the_prompt_computed(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copy, damaged = shm.copy_pages, list[int]()

    def damage(source: Any, shape: Any, pages: Any, target: Any, *rest: Any) -> None:
        copy(source, shape, pages, target, *rest)
        if not damaged:  # the first page of the first push
            target_shape, target_pages, _ = rest
            damaged.append(target_pages[0])
            memory = np.frombuffer(target, np.uint8).reshape(-1, target_shape.page_bytes)
            memory[target_pages[0], 17] ^= 4

    monkeypatch.setattr(shm, "copy_pages", damage)
    pair = Pair(tiny_model, pd_checksum=True, deterministic=True)
    try:
        call = {"input_ids": ids(30, seed=4), "sampling_params": greedy()}
        with caplog.at_level(logging.ERROR):
            whole, (_, decoded) = pair.whole.generate(**call), pair.split(**call)
        assert decoded["output_ids"] == whole["output_ids"]
        assert pair.handover(pair.decode)["recomputed"] == {"checksum": 1}
        assert f"page {damaged[0]} of rank 0" in caplog.text and "at the prefill engine" in caplog.text
        pair.split(input_ids=ids(30, seed=5), sampling_params=greedy())
        assert pair.handover(pair.decode)["num_adopted"] == 1
    finally:
        pair.close()
