"""Versions: Python, Segue, the packages that it needs, and the optional ones."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module, metadata

import segue
from segue.config import EngineConfig
from segue.discovery.opening import parse_backends
from segue.doctor.findings import Finding
from segue.extras import EXTRAS, Extra, installer

SHOWN = ("torch", "triton", "transformers", "tokenizers")
_WITH_CUDA = ("triton",)  # comes with torch's builds for CUDA, and is needed on a GPU alone


def describe_versions() -> list[Finding]:
    """Return the findings about Python, Segue and the packages that every engine needs."""
    found = [
        Finding(name="Python", value=f"{platform.python_version()} ({sys.executable})"),
        Finding(name="Segue", value=segue.__version__),
    ]
    found += [_torch() if name == "torch" else _shown(name) for name in SHOWN]
    return [*found, *_unmet()]


def describe_extras(config: EngineConfig) -> list[Finding]:
    """Return a finding for each optional package; it has failed if an option asks for one that is missing."""
    return [_extra(extra, is_needed=_is_needed(extra, config)) for extra in EXTRAS.values()]


def version_of(package: str) -> str | None:
    """Return the version of an installed package; None: it is not installed."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _torch() -> Finding:
    """Return torch's version, and what it is built for; an import that fails is the commonest broken part."""
    try:
        torch = import_module("torch")
    except Exception as error:  # a library of CUDA that is missing is an OSError, a broken build anything
        return Finding(
            name="torch",
            value=f"cannot be imported: {error}",
            status="failed",
            remedy=f"{installer()} install --force-reinstall torch",
        )
    build = "CPUs" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
    return Finding(name="torch", value=f"{torch.__version__}, built for {build}")


def _shown(name: str) -> Finding:
    version = version_of(name)
    if version is not None:
        return Finding(name=name, value=version)
    if name in _WITH_CUDA:
        return Finding(name=name, value="not installed", why="it comes with torch's builds for CUDA")
    return Finding(name=name, value="not installed", status="failed", remedy=f"{installer()} install {name}")


def _unmet() -> Iterator[Finding]:
    """Yield a finding for each package of Segue's metadata that is missing or has another version."""
    try:
        from packaging.requirements import Requirement
    except ImportError:  # it comes with transformers, so that is missing too, and was found above
        return
    with suppress(metadata.PackageNotFoundError):  # Segue runs from its source, and is not installed
        for text in metadata.requires("segue") or ():
            needed = Requirement(text)
            if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
                continue
            version = version_of(needed.name)
            if version is None and needed.name in SHOWN:
                continue
            if version is None or not needed.specifier.contains(version, prereleases=True):
                yield Finding(
                    name=needed.name,
                    value=version or "not installed",
                    status="failed",
                    why=f"Segue needs {needed.name}{needed.specifier}",
                    remedy=f"{installer()} install '{needed.name}{needed.specifier}'",
                )


def _extra(extra: Extra, *, is_needed: bool) -> Finding:
    if extra.is_installed:
        return Finding(name=extra.name, value="installed", why=extra.purpose)
    return Finding(
        name=extra.name,
        value="not installed",
        status="failed" if is_needed else "missing",
        why=f"needed for {extra.purpose}",
        remedy=extra.remedy,
    )


def _is_needed(extra: Extra, config: EngineConfig) -> bool:
    """Whether an option names what the optional package is for, so that the engine ends without it."""
    if extra.name in ("fa3", "flashinfer"):
        return extra.name in [half.strip() for half in config.attention_backend.split(",")]
    if extra.name == "nixl":
        return config.role != "both" and config.pd_transport == "nixl"
    if extra.name == "otel":
        return config.otlp_traces_endpoint is not None
    return config.shadow_mode and extra.name in parse_backends(config.discovery, "discovery")
