"""Resolves the options that the user left open: device, dtype, sizes."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """The options with a value for everything."""

    device: torch.device
    dtype: torch.dtype  # of weights and KV
    page_size: int
    max_running_requests: int
    chunked_prefill_size: int
    deterministic: bool  # the results of a row do not depend on the rest of its batch
    max_len: int  # tokens per sequence that the model or --max-model-len allows
    laps: LapsLimits | None  # None: LAPS is off

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
        )


def resolve_config(config: EngineConfig, source: ModelSource, tp: TPInfo) -> ResolvedConfig:
    """Choose a value for every option that `config` leaves open.

    Raises:
        ConfigError: the device does not exist, or its kernels are not deterministic for this model.
        TensorParallelError: there are more ranks than CUDA devices, or than deterministic sums allow.
    """
    device, dtype = _device(config, tp), _dtype(config, source)
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
    max_running = config.max_running_requests or (16 if on_cpu else 256)
    chunk = config.chunked_prefill_size or (512 if on_cpu else 8192)
    if chunk > max_running * max_len:
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
        page_size=config.page_size or (16 if on_cpu else 64),
        max_running_requests=max_running,
        chunked_prefill_size=min(chunk, max_running * max_len),
        deterministic=config.deterministic,
        max_len=max_len,
        laps=laps_limits(config, on_cpu=on_cpu),
    )


def _device(config: EngineConfig, tp: TPInfo) -> torch.device:
    """Return the device of this rank: the CPU, or the CUDA device with the rank's number.

    With `auto` it is CUDA if torch sees a device. Raises ConfigError or TensorParallelError if none fits.
    """
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


def _dtype(config: EngineConfig, source: ModelSource) -> torch.dtype:
    """Return the user's dtype; with `auto`, float16 for float16 checkpoints and bfloat16 for all others."""
    if config.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.dtype)
        return dtype
    # bfloat16 is precise enough for quantised values and for float32 checkpoints.
    is_half = source.config.dtype == "float16" and source.gguf is None
    return torch.float16 if is_half else torch.bfloat16
