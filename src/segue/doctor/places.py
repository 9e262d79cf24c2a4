"""The places that a server needs: its port, its caches, and the model that comes with Segue."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from segue.checkpoint import bundled
from segue.config import EngineConfig
from segue.doctor.findings import Finding
from segue.errors import ModelFileError, SegueError
from segue.listener import bind
from segue.memory.budget import gib


def describe_places(config: EngineConfig) -> Iterator[Finding]:
    """Yield the findings about ports, caches and the bundled model."""
    yield _port(config.host, config.port, "--port")
    if config.probed_port is not None:
        yield _port(config.system_host or config.host, config.probed_port, "--system-port")
    yield _directory("cache of models", Path(config.cache_dir), "--cache-dir", is_needed=_converts(config))
    yield _directory("cache of the hub", _hub_cache(), "HF_HOME", is_needed=False)
    yield _directory("temporary files", Path(tempfile.gettempdir()), "TMPDIR", is_needed=True)
    yield _bundled(config)


def describe_compiler(device: str) -> Iterator[Finding]:
    """Yield the findings about what Triton needs at the first launch of a kernel: on a GPU alone."""
    if device != "cuda":
        return
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    yield _directory("cache of kernels", cache, "TRITON_CACHE_DIR", is_needed=True)
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
    yield Finding(
        name="C compiler",
        value=compiler or "none",
        status="ok" if compiler else "failed",
        why="Triton compiles a small C program for each kernel at its first launch",
        remedy="" if compiler else "apt-get install gcc libc6-dev, or set CC to a compiler",
    )


def _port(host: str, port: int, option: str) -> Finding:
    """Return whether a server could listen: the port is taken for a moment, and given back."""
    name = option.strip("-").replace("-", " ")
    try:
        bind(host, port, port_option=option).close()
    except SegueError as error:
        return Finding(name=name, value=error.message, status="failed")
    return Finding(name=name, value=f"{port} on {host} is free" if port else f"any free one on {host}")


def _directory(name: str, path: Path, option: str, *, is_needed: bool) -> Finding:
    """Return whether files can be written to a directory, which need not be there yet."""
    nearest = next(each for each in (path, *path.parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            free = shutil.disk_usage(nearest).free
    except OSError as error:
        return Finding(
            name=name,
            value=f"{path} cannot be written ({error.strerror})",
            status="failed" if is_needed else "missing",
            remedy=f"make it writable, or set another one with {option}",
        )
    return Finding(name=name, value=f"{path}, {gib(free)} free")


def _converts(config: EngineConfig) -> bool:
    """Whether the engine has to write to the cache of models: GGUF files are converted there."""
    return config.model is None or config.model.endswith(".gguf") or config.load_format == "gguf"


def _hub_cache() -> Path:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = Path(os.environ.get("HF_HOME") or caches / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub")


def _bundled(config: EngineConfig) -> Finding:
    """Return where the bundled model is, or how it would be fetched."""
    name, path = "bundled model", Path(config.cache_dir) / "bundled" / bundled.FILE
    if path.exists():
        return Finding(name=name, value=str(path))
    try:
        words = bundled.pip_command()
    except ModelFileError as error:
        is_needed = config.model is None
        return Finding(
            name=name,
            value=error.message,
            status="failed" if is_needed else "missing",
        )
    return Finding(name=name, value=f"is fetched at its first use (93 MB) with {' '.join(words)}")
