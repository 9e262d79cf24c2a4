"""What an engine would choose at its start with given options, each with the reason of the code that chooses.

Nothing is loaded but the model's configuration. Asking a GPU for its free memory makes a context on it, which
takes some hundred MB until this process ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from segue.attention import registry
from segue.checkpoint import bundled
from segue.checkpoint.source import ModelSource, resolve_model
from segue.config import EngineConfig
from segue.disagg.transports.choice import kinds_to_offer, kinds_to_withhold
from segue.distributed.groups import all_devices_have_peer_access
from segue.distributed.info import TPInfo
from segue.doctor.findings import Finding
from segue.extras import NIXL
from segue.host import free_cpu_memory
from segue.launch.runtime import check_options
from segue.memory.budget import gib, plan_pages
from segue.model_runner.demand import least_demand
from segue.model_runner.eager import why_impossible, why_unwanted
from segue.model_runner.resolved_config import ResolvedConfig
from segue.model_runner.service_start import choose_kv_owner
from segue.model_runner.start_choice import StartChoice, choose_start
from segue.models.config import ModelConfig
from segue.options import spelling
from segue.server.lifecycle import check_server_options

_SIZES = ("page_size", "max_running_requests", "chunked_prefill_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenStart:
    """What the start of an engine has chosen before it loads anything."""

    device: str  # the type of it
    findings: list[Finding]


def describe_choices(config: EngineConfig) -> ChosenStart:
    """Return what `segue serve` would choose with `config`.

    Raises:
        SegueError: it would end with this error, for the options, the model or the memory.
    """
    check_options(config, embedded=False)
    check_server_options(config)
    source, origin = find_model(config)
    model, tp = source.config, TPInfo(0, config.tp)
    chosen = choose_start(config, source, tp)
    resolved, selection = chosen.resolved, chosen.selection
    device = resolved.device.type
    owner, why_owner = choose_kv_owner(config, device)
    findings = [
        Finding(name="model", value=f"{source.name} ({model.architecture})", why=origin),
        Finding(name="device", value=device, why=resolved.reasons["device"]),
        Finding(
            name="dtype", value=str(resolved.dtype).removeprefix("torch."), why=resolved.reasons["dtype"]
        ),
        Finding(
            name="quantization", value=model.quantization or "none", why=resolved.reasons["quantization"]
        ),
        Finding(
            name="KV cache dtype",
            value="fp8" if resolved.fp8_kv else str(resolved.dtype).removeprefix("torch."),
            why=resolved.reasons["kv_cache_dtype"],
        ),
        *(
            Finding(name=spelling(name), value=str(getattr(resolved, name)), why=resolved.reasons[name])
            for name in _SIZES
        ),
        Finding(name="--max-model-len", value=str(resolved.max_len), why=resolved.reasons["max_model_len"]),
        Finding(name="attention backend", value=selection.name, why=selection.why),
        *_other_backends(chosen),
        _graphs(config, chosen, model),
        _memory(config, resolved, model, tp),
        Finding(name="KV cache's owner", value=owner, why=why_owner),
        *_transports(config, device),
    ]
    return ChosenStart(device=device, findings=findings)


def find_model(config: EngineConfig) -> tuple[ModelSource, str]:
    """Return the model of `config`, as far as its configuration tells it, and where that comes from.

    Weights are never fetched: of a model of the hub only the small files are, and the bundled model's
    configuration is known without its file.

    Raises:
        ModelFileError: there is no such model.
        UnsupportedModelError: Segue does not have its architecture.
    """
    if config.model is None:
        path = Path(config.cache_dir) / "bundled" / bundled.FILE
        source = ModelSource(
            name=bundled.NAME,
            format="gguf",
            directory=path.parent,
            gguf=path,
            tokenizer_directory=None,
            config=ModelConfig.from_hf(bundled.CONFIG).quantized(config.quantization),
            model_type="llama",
            architectures=("LlamaForCausalLM",),
            eos_token_ids=(),
        )
        return source, "the bundled model, because --model is left out"
    is_local = Path(config.model).expanduser().exists()
    load_format = config.load_format if is_local else "dummy"
    source = resolve_model(replace(config, load_format=load_format))
    return source, (
        "--model names it" if is_local else "--model names it; weights of the hub are fetched at the start"
    )


def _other_backends(chosen: StartChoice) -> Iterator[Finding]:
    """Yield why the attention backends of this device that are not selected are not."""
    names = {entry.name for _, entry in chosen.selection.prefill} | {chosen.selection.decode.name}
    device = chosen.resolved.device.type
    for name, reasons in registry.verdicts(chosen.setting).items():
        if name not in names and device in registry.devices_of(name):
            yield Finding(
                name=f"not used: {name}",
                value="; ".join(reasons) if reasons else "it could be, by --attention-backend",
            )


def _graphs(config: EngineConfig, chosen: StartChoice, model: ModelConfig) -> Finding:
    """Return whether steps would be captured in CUDA graphs."""
    device, ranks = chosen.resolved.device.type, config.tp
    reason = why_unwanted(config, device) or why_impossible(chosen.selection, model, chosen.experts)
    if reason is None and ranks > 1 and not all_devices_have_peer_access(ranks):
        reason = "the CUDA devices cannot address each other's memory"
    if reason is not None:
        return Finding(name="CUDA graphs", value="no", why=reason)
    return Finding(
        name="CUDA graphs",
        value="yes",
        why="the backends can be captured; the start goes on without graphs if too little memory is left",
    )


def _memory(config: EngineConfig, resolved: ResolvedConfig, model: ModelConfig, tp: TPInfo) -> Finding:
    """Return what the engine may use, and at most how many tokens of KV that leaves room for.

    Raises:
        OutOfMemoryError: not even the least that the engine needs fits.
    """
    on_cpu = resolved.device.type == "cpu"
    free = free_cpu_memory() if on_cpu else torch.cuda.mem_get_info(resolved.device)[0]
    demand = least_demand(config, resolved, model, tp, free)
    budget = plan_pages(demand, config.num_kv_tokens)
    where = "this host" if on_cpu else "the device"
    return Finding(
        name="--memory-ratio",
        value=f"{config.memory_ratio} of the {gib(free)} that are free on {where}; weights of one rank: "
        f"{gib(demand.arena_bytes)}; KV: at most {budget.num_pages * resolved.page_size} tokens",
        why=f"the number of KV tokens is limited by {budget.limited_by}",
    )


def _transports(config: EngineConfig, device: str) -> Iterator[Finding]:
    """Yield how KV would be handed over, and why each other way would not be offered.

    Raises:
        ConfigError: `--pd-transport` names one that does not move KV of this device.
    """
    facts = {"has_key": config.pd_key is not None, "has_nixl": NIXL.is_installed}
    offered = kinds_to_offer(config.pd_transport, device, **facts)
    unused = "; not used with --role both, which hands nothing over" if config.role == "both" else ""
    yield Finding(
        name="KV hand-over by",
        value=", ".join(offered) or "nothing",
        why=f"{'they move' if len(offered) > 1 else 'it moves'} KV of --device {device}{unused}",
    )
    for kind, reason in kinds_to_withhold(config.pd_transport, device, **facts).items():
        yield Finding(name=f"not offered: {kind}", value=reason)
