"""Tests of the embedded scheduler, in a thread, with the real runner."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import segue
from segue.errors import ConfigError, EngineStartError, OutOfMemoryError

OPTIONS = {"load_format": "dummy", "dtype": "float32", "embedded": True, "log_level": "error"}


def test_an_embedded_engine_gives_the_same_tokens_as_a_process(tiny_model: Path) -> None:
    params = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    with segue.Engine(str(tiny_model), num_kv_tokens=2048, **OPTIONS) as engine:
        assert engine._runtime.worker_pids == []
        replies = [engine.generate(["Hello", "Good day"], params) for _ in range(2)]
        assert engine.get_server_info()["internal_states"][0]["num_generated_tokens"] == 48
    with segue.Engine(str(tiny_model), num_kv_tokens=2048, **{**OPTIONS, "embedded": False}) as engine:
        replies.append(engine.generate(["Hello", "Good day"], params))
    ids = [[each["output_ids"] for each in reply] for reply in replies]
    assert ids[0] == ids[1] == ids[2]


def test_tiny_chunks_pages_and_buckets_do_not_change_the_tokens(tiny_model: Path) -> None:
    params = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    tiny = {"chunked_prefill_size": 4, "page_size": 4, "max_running_requests": 4}
    lists = {"precompile_token_paddings": [4], "precompile_bs_paddings": [4]}
    replies = []
    for options in ({}, tiny | lists):
        with segue.Engine(str(tiny_model), num_kv_tokens=2048, **OPTIONS, **options) as engine:
            replies.append([each["output_ids"] for each in engine.generate(["Hello", "Good day"], params)])
    assert replies[0] == replies[1]


def test_two_embedded_engines_live_side_by_side(tiny_model: Path) -> None:
    params = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
    with segue.Engine(str(tiny_model), num_kv_tokens=1024, **OPTIONS) as one:
        with segue.Engine(str(tiny_model), num_kv_tokens=1024, **OPTIONS) as other:
            assert one.generate("a", params)["output_ids"] == other.generate("a", params)["output_ids"]
        assert one.generate("a", params)["meta_info"]["completion_tokens"] == 4


def test_a_failure_at_start_is_raised(tiny_model: Path) -> None:
    with pytest.raises((OutOfMemoryError, ConfigError), match="page"):
        segue.Engine(str(tiny_model), num_kv_tokens=1, **OPTIONS)


def test_a_scheduler_that_cannot_even_be_imported_is_an_error_and_not_a_hang(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "segue.worker.main", None)
    with pytest.raises(EngineStartError, match="ModuleNotFoundError"):
        segue.Engine(str(tiny_model), **OPTIONS | {"log_level": "error"})
