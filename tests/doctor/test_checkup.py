"""The whole check-up: it ends with a verdict whatever is broken."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch

from segue.config import EngineConfig
from segue.doctor import checkup, versions
from segue.doctor.checkup import check_up
from segue.doctor.findings import Checkup, Finding
from segue.doctor.machine import DriverGpu

GPU = DriverGpu(name="NVIDIA H200", capability="9.0", driver="570.1", total_mib="9", free_mib="9")


def examine(**options: Any) -> Checkup:
    return check_up(EngineConfig.create({}, **{"port": 0, "device": "cpu", **options}))


def titled(found: Checkup, title: str) -> dict[str, Finding]:
    (section,) = [each for each in found.sections if each.title == title]
    return {each.name: each for each in section.findings}


def test_here_an_engine_can_be_served() -> None:
    found = examine()
    assert found.can_serve and found.failures == []
    assert titled(found, "What an engine would choose")["device"].value == "cpu"


def test_an_error_of_the_start_is_the_reason_why_not() -> None:
    found = examine(model="/no/such/model")
    assert not found.can_serve
    (failure,) = found.failures
    assert "/no/such/model" in failure.value


def test_without_torch_nothing_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> NoReturn:
        raise ImportError("no torch")

    monkeypatch.setattr(versions, "import_module", broken)
    found = examine()
    assert [each.name for each in found.failures] == ["torch"]
    assert titled(found, "What an engine would choose")["choices"].value == "unknown"


def test_a_gpu_that_torch_does_not_see_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "driver_gpus", lambda: [GPU])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for built_for, word in ((None, "built for CPUs"), ("13.0", "the driver is 570.1")):
        monkeypatch.setattr(torch.version, "cuda", built_for)
        finding = titled(examine(), "Devices")["torch and GPU"]
        assert finding.status == "missing" and word in finding.why and finding.remedy
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "torch and GPU" not in titled(examine(), "Devices")


def test_a_gpu_that_does_not_start_is_an_error_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: object = None) -> NoReturn:
        raise RuntimeError("CUDA error: unknown error\nand many lines")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", broken)
    (failure,) = examine(device="auto").failures
    assert "CUDA error: unknown error" in failure.value and "--device cpu" in failure.remedy
