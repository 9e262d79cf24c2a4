"""Makes the memory of a rank whose weights the memory service keeps, from the options of its engine."""

from __future__ import annotations

import hashlib
import os
from typing import Literal

import torch

from segue.checkpoint.source import ModelSource
from segue.config import EngineConfig
from segue.distributed.groups import TPGroups
from segue.distributed.info import TPInfo
from segue.gms.client_connection import GmsTarget
from segue.gms.manifest import SourceFile, TensorPlace, WeightsIdentity
from segue.memory.arena import Layout
from segue.memory.cuda_driver import device_uuids
from segue.memory.rank_memory import PrivateMemory, RankMemory, SharedKVMemory
from segue.memory.releasable import ReleasableMemory
from segue.model_runner.service_kv import ServiceKVMemory
from segue.model_runner.service_memory import ServiceMemory


def make_service_memory(
    config: EngineConfig, source: ModelSource, device: torch.device, dtype: torch.dtype, groups: TPGroups
) -> ServiceMemory:
    """Return the memory of a rank of an engine that has `--gms-dir`."""
    assert config.gms_dir is not None and config.gms_mode != "off"
    tp = groups.tp
    target = GmsTarget(
        directory=config.gms_dir,
        cohort=config.cohort,
        engine=config.engine_id or f"{os.uname().nodename}-{os.getppid()}",
        rank=tp.rank,
        size=tp.size,
        device="cpu" if device.type == "cpu" else device_uuids()[device.index],
        token=config.gms_token,
    )
    return ServiceMemory(
        device,
        target,
        config.gms_mode,
        groups,
        lambda layout: identity_of(source, layout, tp, dtype, seed=config.seed),
        kv=kv_memory(config, device),
        fence_timeout_s=config.fence_timeout_s,
        keeps_journal=config.warm_kv,
    )


def kv_memory(config: EngineConfig, device: torch.device) -> RankMemory:
    """Return what has the KV cache of a rank: its role may change, or it stands by, which needs no cache yet.

    On a CPU, memory that nobody has written to is not there anyway.
    """
    if config.role != "both":
        return SharedKVMemory(device)
    if not config.parks_kv:
        return PrivateMemory(device)
    if choose_kv_owner(config, device.type)[0] == "gms":
        return ServiceKVMemory(device)
    return PrivateMemory(device) if device.type == "cpu" else ReleasableMemory(device, parks_kv=True)


def choose_kv_owner(config: EngineConfig, device: str) -> tuple[Literal["gms", "private"], str]:
    """Return whose memory the KV cache of an engine that wakes is, for `--kv-owner`, and why."""
    if reason := config.why_kv_is_private:
        return "private", reason.partition(";")[0]
    if config.kv_owner != "auto":
        return config.kv_owner, "--kv-owner names it"
    if device == "cuda":
        return "gms", "on CUDA the next engine of the cohort gets this memory"
    if config.warm_kv:
        return "gms", "--warm-kv goes on with what is in it"
    return "private", "on a CPU, memory that nobody has written to takes none"


def identity_of(
    source: ModelSource, layout: Layout, tp: TPInfo, dtype: torch.dtype, *, seed: int = 0
) -> WeightsIdentity:
    """Return what decides the bytes of a rank's weights; `seed` is for dummy weights."""
    if source.format == "dummy":
        stamps = [SourceFile(name="dummy", size=0, stamp=f"seed {seed}")]
    else:
        files = [source.gguf] if source.gguf else sorted(source.directory.glob("*.safetensors"))
        stats = [(file.name, file.stat()) for file in files]
        stamps = [SourceFile(name, stat.st_size, f"{stat.st_mtime_ns}:{stat.st_ino}") for name, stat in stats]
    return WeightsIdentity(
        model=str(source.gguf or source.directory),
        config_sha256=hashlib.sha256((source.directory / "config.json").read_bytes()).hexdigest(),
        dtype=str(dtype).removeprefix("torch."),
        tp_rank=tp.rank,
        tp_size=tp.size,
        slab_sizes=list(layout.sizes),
        tensors=[
            TensorPlace(each.name, each.slab, each.offset, each.shape, str(each.dtype).removeprefix("torch."))
            for each in layout.table.values()
        ],
        source=stamps,
    )
