"""What an engine would choose is what it chooses, with the reasons of the code that does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from segue.attention import registry
from segue.checkpoint.source import resolve
from segue.config import EngineConfig
from segue.distributed.info import TPInfo
from segue.doctor.chosen import describe_choices, find_model
from segue.doctor.findings import Finding
from segue.errors import ConfigError, ModelFileError, OutOfMemoryError, SegueError
from segue.model_runner.start_choice import choose_start
from tests.model_runner import tiny

GIB = 1 << 30


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a Hopper GPU, as torch would see it, and without FlashAttention-3."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (100 * GIB, 140 * GIB))


def choices(**options: Any) -> dict[str, Finding]:
    found = describe_choices(EngineConfig.create({}, **options)).findings
    assert all(each.why or each.name.startswith("not ") for each in found)  # a reason for everything
    return {each.name: each for each in found}


def test_on_a_cpu_the_choices_are_those_of_the_start(tmp_path: Path) -> None:
    tiny.save_llama(tmp_path)
    config = EngineConfig.create({}, model=str(tmp_path), device="cpu")
    chosen = choose_start(config, resolve(config.model, "auto", tmp_path), TPInfo())
    found = choices(model=str(tmp_path), device="cpu")
    assert found["attention backend"].value == chosen.selection.name
    assert found["attention backend"].why == chosen.selection.why
    assert found["--page-size"].value == str(chosen.resolved.page_size)
    assert found["--page-size"].why == chosen.resolved.reasons["page_size"]
    assert (found["CUDA graphs"].value, found["CUDA graphs"].why) == ("no", "a CPU has no CUDA graphs")
    assert found["KV hand-over by"].value.startswith("shm")
    assert "--device cpu" in found["not offered: cuda_ipc"].value
    assert "no memory service" in found["KV cache's owner"].why
    assert "not used: cpu-invariant" in found and "not used: triton" not in found


def test_on_a_gpu_the_reasons_are_those_of_the_measured_table(h200: None) -> None:
    found = choices()
    assert found["model"].value == "SmolLM2-135M-Instruct (LlamaForCausalLM)"
    assert (found["device"].value, found["device"].why) == ("cuda", "torch sees a CUDA device")
    assert found["attention backend"].value == "triton"
    setting = "compute capability 9.0 with heads of 64 and pages of 64 tokens"
    assert setting in found["attention backend"].why
    assert "segue[fa3]" in found["not used: fa3"].value or registry.FA3.is_installed
    assert found["CUDA graphs"].value == "yes"
    assert "100.00 GiB that are free on the device" in found["--memory-ratio"].value


def test_the_bundled_model_is_not_fetched_for_it(tmp_path: Path) -> None:
    source, _ = find_model(EngineConfig.create({}, cache_dir=str(tmp_path)))
    assert source.config.num_layers == 30
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"model": "/no/such/model"}, ModelFileError, "does not exist"),
        ({"attention_backend": "fa3", "device": "cpu"}, ConfigError, "needs cuda"),
        ({"device": "cpu", "tp": 7}, SegueError, "7"),
        ({"device": "cpu", "pd_transport": "cuda_ipc"}, ConfigError, "does not move KV of --device cpu"),
        (
            {"device": "cpu", "memory_ratio": 0.01, "num_kv_tokens": 1 << 40},
            OutOfMemoryError,
            "num-kv-tokens",
        ),
        ({"failover_dir": "/tmp"}, ConfigError, "without --shadow-mode"),
        ({"shadow_mode": True}, ConfigError, "give --failover-dir"),
        (
            {"shadow_mode": True, "failover_dir": "/x", "discovery": "etcd"},
            ConfigError,
            "the URL of the etcd",
        ),
        ({"enable_memory_saver": True, "role": "decode"}, ConfigError, "role='both'"),
    ],
)
def test_an_error_is_that_of_the_start(options: dict[str, Any], error: type[SegueError], words: str) -> None:
    with pytest.raises(error, match=words):
        choices(**options)
