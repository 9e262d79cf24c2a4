"""All attention backends and the choice among them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from segue.attention import cpu
from segue.attention.base import AttentionBackend, AttentionShape, BackendFactory, Capabilities
from segue.attention.capabilities import TRITON
from segue.errors import ConfigError
from segue.kvcache.pool import KVPool


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendEntry:
    """One backend: what it can do and how it is made."""

    name: str
    capabilities: Capabilities
    make: BackendFactory


# In order of preference: "auto" takes the first that fits.
_BACKENDS: dict[str, BackendEntry] = {}


def register(entry: BackendEntry) -> None:
    """Add a backend under its name; a name can be taken once."""
    assert entry.name not in _BACKENDS, entry.name
    _BACKENDS[entry.name] = entry


def names() -> list[str]:
    """Names of all backends, in order of preference."""
    return list(_BACKENDS)


def select(name: str, *, device: torch.device, dtype: torch.dtype, page_size: int) -> BackendEntry:
    """The backend called `name`, or for "auto" the first that fits device, dtype and page size.

    Raises:
        ConfigError: no such backend, or it does not fit.
    """
    if name == "auto":
        for entry in _BACKENDS.values():
            if not misfits(entry.capabilities, device=device, dtype=dtype, page_size=page_size):
                return entry
        raise ConfigError(
            f"no attention backend runs on {device.type} with {dtype} and page size {page_size}; "
            f"backends: {', '.join(names())}; use --device cpu",
            param="attention_backend",
        )
    if name not in _BACKENDS:
        raise ConfigError(
            f"attention backend {name!r} does not exist; choose auto or one of {', '.join(names())}",
            param="attention_backend",
        )
    found = misfits(_BACKENDS[name].capabilities, device=device, dtype=dtype, page_size=page_size)
    if found:
        raise ConfigError(
            f"attention backend {name!r} does not fit: {'; '.join(found)}", param="attention_backend"
        )
    return _BACKENDS[name]


def misfits(
    capabilities: Capabilities, *, device: torch.device, dtype: torch.dtype, page_size: int
) -> list[str]:
    """Why a backend cannot be used, one clause a reason; empty if it can."""
    found = []
    if device.type not in capabilities.devices:
        found.append(f"device {device.type}, it needs {' or '.join(capabilities.devices)}")
    if dtype not in capabilities.dtypes:
        found.append(f"dtype {dtype}, it needs {' or '.join(map(str, capabilities.dtypes))}")
    if capabilities.page_sizes is not None and page_size not in capabilities.page_sizes:
        found.append(f"page size {page_size}, it needs {' or '.join(map(str, capabilities.page_sizes))}")
    return found


def _make_cpu(shape: AttentionShape, pool: KVPool) -> AttentionBackend:
    return cpu.CPUAttention(shape, pool)


def _make_triton(shape: AttentionShape, pool: KVPool) -> AttentionBackend:
    from segue.attention.triton import TritonAttention  # Triton is not there without CUDA

    return TritonAttention(shape, pool)


register(BackendEntry(name="triton", capabilities=TRITON, make=_make_triton))
register(BackendEntry(name="cpu", capabilities=cpu.CAPABILITIES, make=_make_cpu))
