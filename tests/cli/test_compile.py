"""`segue compile`: what it says, and which engine it starts, without a GPU."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from segue.cli import main
from segue.config import EngineConfig
from segue.errors import ConfigError
from segue.kernels.cpu import build
from segue.launch.runtime import Runtime
from segue.messages.control import InitStep

RUNNER = CliRunner()


def run(*words: str) -> Any:
    return RUNNER.invoke(main.app, ["compile", *words], env={"COLUMNS": "200"})


@pytest.mark.parametrize("why_not", ["", "the CPU has no AVX512-BF16"])
def test_for_a_cpu_there_are_its_own_kernels_or_none(monkeypatch: pytest.MonkeyPatch, why_not: str) -> None:
    monkeypatch.setattr(build, "kernels", lambda: build.Kernels(why_not=why_not))
    result = run("--device", "cpu")
    assert result.exit_code == 0
    assert result.stdout.strip() == (
        f"Nothing to compile: {why_not}." if why_not else "The kernels of the CPU are compiled."
    )


@pytest.mark.parametrize("has_triton", [True, False])
def test_without_a_device_the_error_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, has_triton: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if has_triton else None)
    error = run("some-model").exception
    assert isinstance(error, ConfigError)
    missing = "torch sees no CUDA device" if has_triton else "Triton, which is not installed"
    assert missing in error.message and "--device cpu compiles those of the CPU" in error.message


def test_an_engine_of_the_same_options_is_started_without_weights_and_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[EngineConfig] = []
    ended: list[bool] = []
    steps = [InitStep("weights", 1.0, 5), InitStep("kernels", 2.5, 0, "7 compiled, 1 loaded")]

    async def shutdown() -> None:
        ended.append(True)

    async def start(config: EngineConfig, **_: Any) -> Any:
        started.append(config)
        ready = SimpleNamespace(init_steps=steps)
        return SimpleNamespace(manager=SimpleNamespace(ready=ready), shutdown=shutdown)

    triton = ModuleType("triton")
    triton.__spec__ = importlib.util.spec_from_loader("triton", None)
    triton.knobs = SimpleNamespace(cache=SimpleNamespace(dir="/cache/triton"))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Runtime, "start", start)
    result = run("some-model", "--tp", "2", "--max-model-len", "64")
    assert result.exit_code == 0, result.output
    [config] = started
    assert (config.model, config.load_format, config.tp, config.max_model_len) == (
        "some-model",
        "dummy",
        2,
        64,
    )
    assert ended == [True]
    assert "7 compiled, 1 loaded, in a start of 3.5 s. The cache is /cache/triton" in result.stdout
