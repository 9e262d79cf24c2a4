"""Resolves the options that the user left open: device, dtype, sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from segue.checkpoint.source import ModelSource
from segue.config import EngineConfig
from segue.distributed.info import TPInfo
from segue.errors import ConfigError, TensorParallelError
from segue.kvcache.pool import KVShape
from segue.laps.limits import laps_limits
from segue.logs import logger
from segue.messages.control import LapsLimits
from segue.models.config import ModelConfig
from segue.models.sharding import Shard
from segue.options import spelling


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """The options with a value for everything."""

    device: torch.device
    dtype: torch.dtype  # of weights, and of KV unless that is in FP8
    fp8_kv: bool  # whether the KV cache is in FP8
    page_size: int
    max_running_requests: int
    chunked_prefill_size: int
    deterministic: bool  # the results of a row do not depend on the rest of its batch
    max_len: int  # tokens per sequence that the model or --max-model-len allows
    laps: LapsLimits | None  # None: LAPS is off
    reasons: Mapping[str, str] = field(default_factory=dict)  # why a value is what it is, by option

    @property
    def max_step_tokens(self) -> int:
        """The tokens that every buffer must hold: a whole chunk, or one per request if that is more."""
        return max(self.chunked_prefill_size, self.max_running_requests)

    def kv_shape(self, model: ModelConfig, shard: Shard, num_pages: int) -> KVShape:
        """Return the sizes of a KV pool of one rank."""
        return KVShape(
            num_pages=num_pages,
            num_layers=model.num_layers,
            page_size=self.page_size,
            num_kv_heads=shard.num_kv_heads,
            head_dim=model.head_dim,
            dtype=self.dtype,
            fp8=self.fp8_kv,
        )


def resolve_config(config: EngineConfig, source: ModelSource, tp: TPInfo) -> ResolvedConfig:
    """Choose a value for every option that `config` leaves open.

    Raises:
        ConfigError: the device does not exist, or its kernels are not deterministic for this model.
        TensorParallelError: there are more ranks than CUDA devices, or than deterministic sums allow.
    """
    reasons: dict[str, str] = {}
    device, reasons["device"] = _device(config, tp)
    reasons["quantization"] = (
        "--quantization names it" if config.quantization != "auto" else "the checkpoint's own format"
    )
    dtype, reasons["dtype"] = _dtype(config, source)
    if source.config.fp8 is not None and device.type == "cuda":
        _check_fp8(device, dtype)
    fp8_kv = config.kv_cache_dtype != "auto"
    reasons["kv_cache_dtype"] = "--kv-cache-dtype names it" if fp8_kv else "as --dtype"
    if fp8_kv and device.type == "cuda":
        _check_has_fp8(device, "a KV cache", "leave --kv-cache-dtype out", param="kv_cache_dtype")
    if config.deterministic and device.type == "cuda":
        _check_deterministic(source, tp, device, dtype)
    model_len = source.config.max_position
    on_cpu = device.type == "cpu"
    if config.deterministic and on_cpu and tp.size > 2:
        raise TensorParallelError(
            f"deterministic=True, tp={tp.size}: on CPUs the order in which more than two ranks are summed "
            "depends on the index of a row; use --tp 1 or 2",
            param="deterministic",
        )
    max_len = min(model_len, config.max_model_len or model_len)

    def size(name: str, given: int | None, cpu: int, cuda: int) -> int:
        """Return the value of an option that has another default on each device, and keep the reason."""
        reasons[name] = f"the default on {device.type}" if given is None else f"{spelling(name)} says so"
        return given or (cpu if on_cpu else cuda)

    page_size = size("page_size", config.page_size, 16, 64)
    max_running = size("max_running_requests", config.max_running_requests, 16, 256)
    # The KV of a chunk is handed over while the next one is computed, and that of the last chunk while the
    # request waits: with larger chunks it waits longer, and 4096 tokens keep a GPU as busy as 8192.
    on_cuda = 4096 if config.role == "prefill" else 8192
    chunk = size("chunked_prefill_size", config.chunked_prefill_size, 512, on_cuda)
    reasons["max_model_len"] = (
        "the model's longest sequence" if max_len == model_len else "--max-model-len says so"
    )
    if chunk > max_running * max_len:
        reasons["chunked_prefill_size"] = f"{max_running} requests of {max_len} tokens never need more"
        logger.info(
            "chunked_prefill_size is %d, not %d: %d requests of %d tokens never need more",
            max_running * max_len,
            chunk,
            max_running,
            max_len,
        )
    return ResolvedConfig(
        device=device,
        dtype=dtype,
        fp8_kv=fp8_kv,
        page_size=page_size,
        max_running_requests=max_running,
        chunked_prefill_size=min(chunk, max_running * max_len),
        deterministic=config.deterministic,
        max_len=max_len,
        laps=laps_limits(config, on_cpu=on_cpu),
        reasons=reasons,
    )


def _device(config: EngineConfig, tp: TPInfo) -> tuple[torch.device, str]:
    """Return the device of this rank, and why: the CPU, or the CUDA device with the rank's number.

    With `auto` it is CUDA if torch sees a device. Raises ConfigError or TensorParallelError if none fits.
    """
    if config.device == "cpu":  # the driver is not asked
        return torch.device("cpu"), "--device names it"
    if not torch.cuda.is_available():
        if config.device == "auto":
            return torch.device("cpu"), "torch sees no CUDA device"
        raise ConfigError("device='cuda', but torch sees no CUDA device; use --device cpu", param="device")
    if tp.size > torch.cuda.device_count():
        raise TensorParallelError(
            f"tp={tp.size}, but there are {torch.cuda.device_count()} CUDA devices; lower --tp", param="tp"
        )
    why = "--device names it" if config.device == "cuda" else "torch sees a CUDA device"
    return torch.device("cuda", tp.rank), why


def _check_has_fp8(device: torch.device, what: str, otherwise: str, param: str) -> None:
    """Raise an error if this CUDA device cannot compute with what is in FP8."""
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        raise ConfigError(
            f"{what} in FP8 on compute capability {capability}: the device must have FP8, which (8, 9) was "
            f"the first to have; use such a device, or {otherwise}",
            param=param,
        )


def _check_fp8(device: torch.device, dtype: torch.dtype) -> None:
    """Raise the reason why weights in FP8 cannot be used on this CUDA device, if there is one."""
    otherwise = "a bfloat16 version of the model without --quantization"
    _check_has_fp8(device, "weights", otherwise, param="quantization")
    if dtype == torch.float32:
        raise ConfigError(
            "weights in FP8 with dtype='float32': on CUDA the activations must be in bfloat16 or float16; "
            "use one of them",
            param="dtype",
        )


def _check_deterministic(source: ModelSource, tp: TPInfo, device: torch.device, dtype: torch.dtype) -> None:
    """Raise the reason why `--deterministic` cannot be kept on this CUDA device, if there is one."""
    remedy, capability = "or leave --deterministic out", torch.cuda.get_device_capability(device)
    if tp.size > 1:
        raise TensorParallelError(
            f"deterministic=True with tp={tp.size}: on CUDA the order in which the ranks' results are added "
            f"depends on the step; use --tp 1, {remedy}",
            param="tp",
        )
    if source.config.moe is not None:
        raise ConfigError(
            f"deterministic=True with a mixture of experts: on CUDA the GEMMs of an expert depend on the "
            f"number of its tokens; use a dense model, {remedy}",
            param="deterministic",
        )
    if source.config.fp8 is not None:
        raise ConfigError(
            f"deterministic=True with weights in FP8: on CUDA there is no batch-invariant GEMM for them; use "
            f"a bfloat16 version of the model without --quantization, {remedy}",
            param="deterministic",
        )
    if dtype == torch.float32:
        raise ConfigError(
            f"deterministic=True with dtype='float32': on CUDA only bfloat16 and float16 have deterministic "
            f"kernels; use one of them, {remedy}",
            param="dtype",
        )
    if capability != (9, 0):
        raise ConfigError(
            f"deterministic=True on compute capability {capability}: the deterministic kernels have been "
            f"verified on (9, 0) only; use such a device, {remedy}",
            param="deterministic",
        )


def _dtype(config: EngineConfig, source: ModelSource) -> tuple[torch.dtype, str]:
    """Return the user's dtype, and why; with `auto`, float16 for float16 checkpoints, else bfloat16."""
    if config.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.dtype)
        return dtype, "--dtype names it"
    if source.gguf is not None:
        return torch.bfloat16, "bfloat16 is precise enough for the quantised values of a GGUF file"
    if source.config.dtype in ("float16", "bfloat16"):
        return getattr(torch, source.config.dtype), f"the checkpoint is {source.config.dtype}"
    return (
        torch.bfloat16,
        f"bfloat16 is precise enough for a checkpoint in {source.config.dtype or 'float32'}",
    )
