"""The profile run: sizes that cannot fit are refused before it starts, and a long run is announced."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from segue.attention.base import AttentionBackend
from segue.errors import OutOfMemoryError
from segue.model_runner import profile_run, startup
from tests.model_runner import making, tiny

GIB = 1 << 30


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    tiny.save_llama(directory)
    return directory


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if weights are loaded, which comes before the profile run."""
    monkeypatch.setattr(startup, "load_weights", lambda *_, **__: pytest.fail("weights were loaded"))


@pytest.mark.parametrize(
    "sizes",
    [{"max_running_requests": 65536}, {"chunked_prefill_size": 1 << 20, "max_running_requests": 8192}],
    ids=str,
)
def test_sizes_that_cannot_fit_are_refused_at_once(
    sizes: dict[str, Any], llama: Path, no_model: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "free_cpu_memory", lambda: GIB // 4)
    began = time.process_time()
    with pytest.raises(OutOfMemoryError) as raised:
        making.make_runner(llama, **sizes)
    assert time.process_time() - began < 2
    assert f"max_running_requests={sizes['max_running_requests']} and chunked_prefill_size=" in str(
        raised.value
    )
    assert "lower --max-running-requests or --chunked-prefill-size" in str(raised.value)


def test_the_error_names_the_memory_for_weight_updates(
    llama: Path, no_model: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "free_cpu_memory", lambda: GIB // 4)
    with pytest.raises(OutOfMemoryError, match=r"of it for weight updates.* or --weight-staging-gb"):
        making.make_runner(llama, weight_staging_gb=4.0)


def test_the_buffers_that_the_attention_backend_keeps_are_counted(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    headrooms = []
    for num_bytes in (0, GIB):
        monkeypatch.setattr(AttentionBackend, "num_bytes", num_bytes)
        runner = making.make_runner(llama)
        headrooms.append(runner._startup.headroom)
        runner.close()
    assert headrooms[1] - headrooms[0] > GIB // 2


def test_a_long_profile_run_is_announced_before_it_starts(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "segue")
    monkeypatch.setattr(profile_run, "_CPU_SPEED", 1e6)

    def measure(*_: Any) -> int:
        assert "profile run: a step of 64 tokens" in caplog.text
        assert "--chunked-prefill-size (64) or --max-running-requests (8)" in caplog.text
        raise torch.OutOfMemoryError

    monkeypatch.setattr(profile_run, "_measure", measure)
    with pytest.raises(OutOfMemoryError, match=r"a step of 64 tokens .*lower --chunked-prefill-size or"):
        making.make_runner(llama)


def test_a_short_profile_run_is_not_announced(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "segue")
    making.make_runner(llama).close()
    assert "profile run" not in caplog.text
