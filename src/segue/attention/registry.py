"""The attention backends and their selection.

Prefill and decode are the two halves of a step. Each half may have its own backend, and prefill may even have
several, for steps of different sizes. A ranking is a list of backends' names, the fastest first, as measured
on a device.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from segue.attention import flashinfer
from segue.attention.base import AttentionBackend, AttentionShape, Context, PagedBackend, StepLengths
from segue.errors import ConfigError
from segue.extras import FA3, FLASHINFER, Extra
from segue.kernels.activations import TokenQKV
from segue.kernels.cpu.build import kernels
from segue.kvcache.pool import KVPool

# Rankings of backends, fastest first, by compute capability ("9.0"), head size, page size and half, and for
# prefill by tokens per step. bench/attention.py writes them. Devices of one compute capability have the same
# instructions, so all of them use the ranking of the device that was measured.
TABLE = Path(__file__).parent / "measured.json"
# The error about a value of --attention-backend.
_refusal = partial(ConfigError, param="attention_backend")
# Empty rankings, for steps of up to 2**30 tokens, which means of any size.
_NO_RANKING: dict[str, Any] = {"prefill": {1 << 30: []}, "decode": []}


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend supports; `None` means no limit."""

    devices: tuple[str, ...]  # torch device types
    dtypes: tuple[torch.dtype, ...]
    page_sizes: tuple[int, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    max_group_size: int | None = None  # query heads per key-value head
    max_requests: int | None = None  # of a step
    architectures: tuple[tuple[int, int], ...] | None = None  # CUDA compute capabilities
    package: tuple[str, Extra] | None = None  # required module, and the extra that installs it
    graphs: bool = False  # whether its steps can be captured in CUDA graphs
    why_not: Callable[[], str] | None = None  # asks the machine: one clause, or "" if it supports the backend
    deterministic: bool = False  # batch-invariant: neither batching nor chunking changes a query's bits
    fp8_kv: bool = False  # whether it reads a KV cache in FP8


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendEntry:
    """One backend: its name, capabilities and class."""

    name: str
    capabilities: Capabilities
    backend: str  # "module:class"; the modules of backends for CUDA cannot be imported elsewhere

    def make(self, shape: AttentionShape, pool: KVPool) -> AttentionBackend:
        """Make the backend for one model on one pool; it owns its buffers."""
        made: AttentionBackend = pkgutil.resolve_name(self.backend)(shape, pool)
        return made


class PairedAttention(PagedBackend):
    """Prefill by one backend, or by several according to the step's size, and decode by another."""

    def __init__(self, prefill: Sequence[tuple[int, PagedBackend]], decode: PagedBackend) -> None:
        """Take backends made for the same model and pool.

        Each entry of `prefill` is a backend after the largest number of tokens per step that it serves,
        ascending; the last backend also serves all larger steps.
        """
        self._sizes, self._decode = prefill, decode
        halves = [half for _, half in prefill]
        decode.serves_prefill = decode in halves
        for half in halves:
            half.serves_decode = half is decode
        self.num_bytes = sum(half.num_bytes for half in {decode, *(half for _, half in prefill)})

    def _prefill(self, tokens: int) -> PagedBackend:
        """Returns the backend that does the prefill of a step of `tokens` tokens."""
        return next((half for max_tokens, half in self._sizes if tokens <= max_tokens), self._sizes[-1][1])

    def _halves(self, tokens: int, max_decode: int, has_prefill: bool) -> list[PagedBackend]:
        """Returns the backends that a step uses, each once."""
        halves = [self._prefill(tokens)] if has_prefill else []
        if max_decode and self._decode not in halves:
            halves.append(self._decode)
        return halves

    def prepare(self, ctx: Context) -> None:
        """Prepare the backends that this step uses, each once."""
        for half in self._halves(len(ctx.positions), ctx.num_decode, ctx.has_prefill):
            half.prepare(ctx)

    def plan(self, lengths: StepLengths) -> None:
        """Let the backends plan that this step uses, each once."""
        for half in self._halves(lengths.tokens, lengths.max_decode, lengths.has_prefill):
            half.plan(lengths)

    def decode(self, query: Tensor, output: Tensor, layer: int, ctx: Context) -> None:
        """See `PagedBackend.decode`."""
        self._decode.decode(query, output, layer, ctx)

    def attend_token(self, token: TokenQKV, layer: int, ctx: Context) -> Tensor | None:
        """See `PagedBackend.attend_token`."""
        return self._decode.attend_token(token, layer, ctx)

    def prefill(self, query: Tensor, output: Tensor, layer: int, ctx: Context) -> None:
        """See `PagedBackend.prefill`."""
        self._prefill(len(query)).prefill(query, output, layer, ctx)

    def queries_per_block(self, tokens: int) -> int:
        """See `PagedBackend.queries_per_block`."""
        return self._prefill(tokens).queries_per_block(tokens)

    def row_steps(self, max_rows: int) -> set[int]:
        """See `PagedBackend.row_steps`."""
        halves = [self._decode, *(half for _, half in self._sizes)]
        return {size for size, _ in self._sizes}.union(*(half.row_steps(max_rows) for half in halves))


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The backends of prefill and of decode, which are often the same."""

    prefill: tuple[tuple[int, BackendEntry], ...]  # (largest number of tokens per step, backend), ascending
    decode: BackendEntry
    why: str = ""  # these were selected: one clause, or several where the halves have different reasons

    @property
    def name(self) -> str:
        """The form of `--attention-backend`, with the prefill backends of small steps in parentheses."""
        *small, (_, large) = self.prefill
        if not small and large is self.decode:
            return large.name
        sizes = ", ".join(f"{entry.name} up to {max_tokens} tokens" for max_tokens, entry in small)
        return f"{large.name}{f' ({sizes})' if sizes else ''},{self.decode.name}"

    @property
    def _entries(self) -> dict[str, BackendEntry]:
        """The backends of both halves by name, so each one once."""
        return {entry.name: entry for entry in (self.decode, *(half for _, half in self.prefill))}

    @property
    def graphs(self) -> bool:
        """Whether all of the backends' steps can be captured in CUDA graphs."""
        return all(entry.capabilities.graphs for entry in self._entries.values())

    def make(self, shape: AttentionShape, pool: KVPool) -> AttentionBackend:
        """Make the backend for one model on one pool: the only one, or a `PairedAttention` of several.

        Each backend is made once, even if it serves both halves.
        """
        if len(self._entries) == 1:
            return self.decode.make(shape, pool)
        made = {name: cast(PagedBackend, entry.make(shape, pool)) for name, entry in self._entries.items()}
        return PairedAttention(
            [(max_tokens, made[half.name]) for max_tokens, half in self.prefill], made[self.decode.name]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a backend has to support."""

    shape: AttentionShape
    device: torch.device
    dtype: torch.dtype
    page_size: int
    deterministic: bool = False
    fp8_kv: bool = False  # whether the KV cache is in FP8
    max_requests: int = 1  # that may run at a time


def names() -> list[str]:
    """Returns the names of all backends, in order of preference."""
    return list(_BACKENDS)


def devices_of(name: str) -> tuple[str, ...]:
    """Returns the types of devices that a backend runs on."""
    return _BACKENDS[name].capabilities.devices


def supported_backends(setting: Setting) -> list[str]:
    """Returns the names of the backends that support `setting`."""
    return [name for name, reasons in verdicts(setting).items() if not reasons]


def verdicts(setting: Setting) -> dict[str, list[str]]:
    """Returns for each backend, in order of preference, why it does not support `setting`; [] if it does."""
    return {name: unsupported_reasons(entry.capabilities, setting) for name, entry in _BACKENDS.items()}


def select(name: str, setting: Setting) -> Selection:
    """Select the backends that `--attention-backend` names: one for both halves, or "prefill,decode".

    "auto" is the fastest measured backend that supports `setting`, or else the first one that supports it.

    Raises:
        ConfigError: there is no such backend, or it does not support `setting`.
    """
    halves = [half.strip() for half in name.split(",")]
    if len(halves) > 2:
        raise _refusal(f"attention backend {name!r}: name one backend, or two as 'prefill,decode'")
    measured = _measured(setting) if "auto" in halves else _NO_RANKING
    prefill: list[tuple[int, BackendEntry]] = []
    reasons = []
    for max_tokens, ranking in measured["prefill"].items():
        entry, why = _select(halves[0], ranking, setting)
        reasons.append(why)
        if prefill and prefill[-1][1] is entry:  # one entry serves both sizes, up to the larger one
            prefill.pop()
        prefill.append((int(max_tokens), entry))
    decode, why = _select(halves[-1], measured["decode"], setting)
    if setting.device.type == "cpu" and any(entry is not decode for _, entry in prefill):
        raise _refusal(f"attention backend {name!r}: on a CPU one backend does both halves; name one")
    return Selection(prefill=tuple(prefill), decode=decode, why="; ".join(dict.fromkeys([*reasons, why])))


def _select(name: str, ranking: Sequence[str], setting: Setting) -> tuple[BackendEntry, str]:
    """Returns the backend of one half, for `name` as a user gives it, and why it is this one.

    "auto" takes the first of `ranking` that supports `setting`, or else the first of all backends. Rankings
    come from a file, which may name backends that do not exist.

    Raises:
        ConfigError: see `select`.
    """
    if name == "auto":
        for index, candidate in enumerate([*ranking, *names()]):
            if candidate in _BACKENDS and not unsupported_reasons(_BACKENDS[candidate].capabilities, setting):
                return _BACKENDS[candidate], _why(candidate, setting, is_measured=index < len(ranking))
        raise _refusal(
            f"no attention backend runs on {setting.device.type} with {setting.dtype}, page size "
            f"{setting.page_size} and {setting.shape}; backends: {', '.join(names())}; use --device cpu"
        )
    if name not in _BACKENDS:
        raise _refusal(
            f"attention backend {name!r} does not exist; choose auto or one of {', '.join(names())}"
        )
    found = unsupported_reasons(_BACKENDS[name].capabilities, setting)
    if found:
        raise _refusal(
            f"attention backend {name!r} cannot be used: {'; '.join(found)}. Choose auto or another backend"
        )
    return _BACKENDS[name], "--attention-backend names it"


def _why(name: str, setting: Setting, *, is_measured: bool) -> str:
    """Returns why "auto" takes a backend: by its place in a ranking, or in the order of preference."""
    if is_measured:
        return (
            f"{name} is the fastest that can be used, as measured on compute capability "
            f"{capability(setting.device)} with heads of {setting.shape.head_dim} and pages of "
            f"{setting.page_size} tokens"
        )
    mode = ", and is deterministic" if setting.deterministic else ""
    return f"{name} is the first in the order of preference that runs on {setting.device.type}{mode}"


def _measured(setting: Setting) -> dict[str, Any]:
    """Returns the rankings for a setting, those of prefill by the largest number of tokens per step.

    They have the form of `_NO_RANKING`, which is returned for settings that were not measured.
    """
    if setting.device.type != "cuda":
        return _NO_RANKING
    table = json.loads(TABLE.read_text()).get(capability(setting.device), {})
    found: dict[str, Any] = table.get(str(setting.shape.head_dim), {}).get(
        str(setting.page_size), _NO_RANKING
    )
    return found


def capability(device: torch.device) -> str:
    """Returns the compute capability of a CUDA device as the table names it, such as `9.0` for Hopper."""
    return "{}.{}".format(*torch.cuda.get_device_capability(device))


def unsupported_reasons(capabilities: Capabilities, setting: Setting) -> list[str]:
    """Returns the reasons why a backend does not support `setting`, one clause each; empty if it does."""
    shape, device, reasons = setting.shape, setting.device, []

    def require(what: str, value: object, allowed: Sequence[object] | None) -> None:
        """Add a reason unless `value` is allowed; None: all values are."""
        if allowed is not None and value not in allowed:
            reasons.append(f"{what} {value}, but it needs {' or '.join(map(str, allowed))}")

    require("device", device.type, capabilities.devices)
    if setting.deterministic and not capabilities.deterministic:
        reasons.append(
            "its bits depend on the batch, so --deterministic cannot use it; leave --attention-backend out"
        )
    require("dtype", setting.dtype, capabilities.dtypes)
    if setting.fp8_kv and not capabilities.fp8_kv:
        reasons.append("it reads no KV cache in FP8; leave --kv-cache-dtype or --attention-backend out")
    require("page size", setting.page_size, capabilities.page_sizes)
    require("head size", shape.head_dim, capabilities.head_dims)
    group = shape.num_heads // shape.num_kv_heads
    if capabilities.max_group_size is not None and group > capabilities.max_group_size:
        reasons.append(
            f"{group} query heads per key-value head, but it takes at most {capabilities.max_group_size}"
        )
    if capabilities.max_requests is not None and setting.max_requests > capabilities.max_requests:
        reasons.append(
            f"{setting.max_requests} requests may run, but it takes at most {capabilities.max_requests}; "
            "lower --max-running-requests"
        )
    if device.type in capabilities.devices and device.type == "cuda" and capabilities.architectures:
        require("compute capability", torch.cuda.get_device_capability(device), capabilities.architectures)
    if not reasons and capabilities.package is not None:  # checked last, because the import takes time
        module, extra = capabilities.package
        try:
            importlib.import_module(module)
        except (ImportError, OSError) as error:
            reasons.append(f"{module} cannot be imported ({error}); {extra.remedy}")
    if not reasons and capabilities.why_not is not None and (reason := capabilities.why_not()):
        reasons.append(reason)
    return reasons


_CPU = Capabilities(devices=("cpu",), dtypes=(torch.float32, torch.bfloat16, torch.float16), fp8_kv=True)
_AVX512 = Capabilities(
    devices=("cpu",),
    dtypes=(torch.bfloat16,),
    head_dims=tuple(range(64, 513, 64)),
    why_not=lambda: kernels().why_not,
)
_TRITON = Capabilities(
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    max_group_size=64,  # a prefill block holds at least one query of all heads of a group
    graphs=True,
    fp8_kv=True,
)
_TRITON_INVARIANT = replace(_TRITON, dtypes=(torch.bfloat16, torch.float16), deterministic=True)
_FA3 = Capabilities(
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    head_dims=tuple(range(8, 257, 8)),
    architectures=((9, 0),),
    package=("flash_attn_3._C", FA3),
    graphs=True,
)
_FLASHINFER = Capabilities(
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    head_dims=(64, 128, 256),
    max_requests=flashinfer.MOST_REQUESTS,
    architectures=((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)),
    package=("flashinfer", FLASHINFER),
    graphs=True,
    why_not=flashinfer.why_not,
)
# In order of preference where there is no measured ranking.
_BACKENDS = {
    name: BackendEntry(name=name, capabilities=capabilities, backend=f"segue.attention.{backend}")
    for name, capabilities, backend in (
        ("triton", _TRITON, "triton:TritonAttention"),
        ("fa3", _FA3, "fa3:FA3Attention"),
        ("triton-invariant", _TRITON_INVARIANT, "triton:TritonInvariantAttention"),
        ("flashinfer", _FLASHINFER, "flashinfer:FlashInferAttention"),
        ("avx512", _AVX512, "avx512:AVX512Attention"),
        ("avx512-invariant", replace(_AVX512, deterministic=True), "avx512:AVX512InvariantAttention"),
        ("cpu", _CPU, "cpu:CPUAttention"),
        ("cpu-invariant", replace(_CPU, deterministic=True), "cpu_invariant:InvariantCPUAttention"),
    )
}
