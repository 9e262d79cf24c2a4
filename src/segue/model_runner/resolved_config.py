"""What is chosen at start where the user did not: device, dtype, sizes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from segue.checkpoint.source import ModelSource
from segue.config import EngineConfig
from segue.distributed.info import TPInfo
from segue.errors import ConfigError, TensorParallelError
from segue.logs import logger

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """Options with nothing left open."""

    device: torch.device
    dtype: torch.dtype  # of weights and KV
    page_size: int
    max_running_requests: int
    chunked_prefill_size: int
    deterministic: bool  # a row's results depend on nothing else in its batch
    max_len: int  # tokens: what the model or --max-model-len allows

    @property
    def largest_step(self) -> int:
        """Tokens of a step that every buffer has to hold: a whole chunk, or a token of each request."""
        return max(self.chunked_prefill_size, self.max_running_requests)


def resolve_config(config: EngineConfig, source: ModelSource, tp: TPInfo) -> ResolvedConfig:
    """Fill in what `config` leaves open.

    Raises:
        ConfigError: a device that is not there, or determinism where CUDA's kernels do not have it.
        TensorParallelError: more ranks than CUDA devices, or than a deterministic sum may have.
    """
    device, dtype = _device(config, tp), _dtype(config, source)
    if config.deterministic and device.type == "cuda":
        _check_deterministic(source, tp, device, dtype)
    model_len = source.config.max_position
    on_cpu = device.type == "cpu"
    if config.deterministic and on_cpu and tp.size > 2:
        raise TensorParallelError(
            f"deterministic=True, tp={tp.size}: on CPUs the order in which more than two ranks are summed "
            "depends on a row's place; use --tp 1 or 2",
            param="deterministic",
        )
    max_len = min(model_len, config.max_model_len or model_len)
    max_running = config.max_running_requests or (16 if on_cpu else 256)
    chunk = config.chunked_prefill_size or (512 if on_cpu else 8192)
    if chunk > max_running * max_len:
        logger.info(
            "chunked_prefill_size is %d, not %d: %d requests of %d tokens never have more to compute",
            max_running * max_len,
            chunk,
            max_running,
            max_len,
        )
    return ResolvedConfig(
        device=device,
        dtype=dtype,
        page_size=config.page_size or (16 if on_cpu else 64),
        max_running_requests=max_running,
        chunked_prefill_size=min(chunk, max_running * max_len),
        deterministic=config.deterministic,
        max_len=max_len,
    )


def _device(config: EngineConfig, tp: TPInfo) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cpu" or (config.device == "auto" and not has_cuda):
        return torch.device("cpu")
    if not has_cuda:
        raise ConfigError("device='cuda', but torch sees no CUDA device; use --device cpu", param="device")
    if tp.size > torch.cuda.device_count():
        raise TensorParallelError(
            f"tp={tp.size}, but there are {torch.cuda.device_count()} CUDA devices; lower --tp", param="tp"
        )
    return torch.device("cuda", tp.rank)


def _check_deterministic(source: ModelSource, tp: TPInfo, device: torch.device, dtype: torch.dtype) -> None:
    leave, capability = "or leave --deterministic out", torch.cuda.get_device_capability(device)
    if tp.size > 1:
        raise TensorParallelError(
            f"deterministic=True with tp={tp.size}: on CUDA the order in which ranks' results are added up "
            f"depends on the step; use --tp 1, {leave}",
            param="tp",
        )
    if source.config.moe is not None:
        raise ConfigError(
            f"deterministic=True with a mixture of experts: on CUDA the GEMMs of an expert depend on how "
            f"many tokens it gets; use a dense model, {leave}",
            param="deterministic",
        )
    if dtype == torch.float32:
        raise ConfigError(
            f"deterministic=True with dtype='float32': on CUDA only bfloat16 and float16 have such kernels; "
            f"use one of them, {leave}",
            param="dtype",
        )
    if capability != (9, 0):
        raise ConfigError(
            f"deterministic=True on compute capability {capability}: the kernels' bits were compared on "
            f"(9, 0) alone; use such a device, {leave}",
            param="deterministic",
        )


def _dtype(config: EngineConfig, source: ModelSource) -> torch.dtype:
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    # Quantised values and float32 checkpoints lose nothing that matters in bfloat16.
    is_half = source.config.dtype == "float16" and source.gguf is None
    return torch.float16 if is_half else torch.bfloat16
