"""What clients are told of a running engine: its options, sizes and weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
from msgspec.structs import asdict

from segue.launch.runtime import Runtime
from segue.messages.fleet import MODES
from segue.version import __version__

SECRETS = ("api_key", "admin_api_key", "pd_key", "register_key", "gms_token", "ssl_keyfile_password")
# Fields of ``internal_states`` that clients read, for features that this engine does not have.
ABSENT_STATE: dict[str, Any] = {
    "pending_dp_reqs_size": 0,
    "prefill_decode_size": 0,
}
# Kinds of parallelism that this engine does not have. Clients multiply by these sizes.
ABSENT_SIZES = dict.fromkeys(("pp_size", "dp_size", "ep_size", "moe_dp_size", "nnodes"), 1)


async def server_info(runtime: Runtime) -> dict[str, Any]:
    """Return the options, the version, the sizes chosen at start, and the scheduler's state."""
    state = await runtime.manager.calls.get_state()
    kv_tokens = state.state.get("available_kv_tokens", 0)
    ready = runtime.manager.ready
    decided = asdict(ready) | {"init_steps": [asdict(step) for step in ready.init_steps]}
    decided |= {"graphs": msgspec.to_builtins(ready.graphs)}
    decided |= msgspec.to_builtins(decided.pop("limits"))
    options = dataclasses.asdict(runtime.config) | {
        name: "***" for name in SECRETS if getattr(runtime.config, name) is not None
    }
    num_tokens = ready.limits.num_pages * ready.limits.page_size
    return {
        **options,
        **_as_sglang(runtime),
        "version": __version__,
        "model_path": model_path_of(runtime),
        "served_model_name": runtime.name,
        "weight_version": runtime.manager.weights.version,
        "status": "ready",
        "max_total_num_tokens": num_tokens,
        "max_total_tokens": num_tokens,
        "decided": decided,
        "internal_states": [ABSENT_STATE | {"available_kv_tokens_per_dp": [kv_tokens]} | state.state],
    }


def _as_sglang(runtime: Runtime) -> dict[str, Any]:
    """Return the options by SGLang's names, with the values that were chosen at start.

    A rank counts as a GPU on a CPU too: clients take ``num_gpus`` for the number of ranks that weights go to.
    """
    manager, limits = runtime.manager, runtime.manager.ready.limits
    mode, tp = MODES[manager.role], runtime.config.tp
    found = {
        **ABSENT_SIZES,
        "tp_size": tp,
        "num_gpus": tp,
        "node_rank": 0,
        "tokenizer_path": tokenizer_path_of(runtime),
        "dtype": manager.ready.dtype,
        "quantization": runtime.source.config.quantization,
        "context_length": limits.max_seq_len,
        "page_size": limits.page_size,
        "max_running_requests": limits.max_running_requests,
        "chunked_prefill_size": limits.chunked_prefill_size,
        "disaggregation_mode": mode,
        # With one data-parallel rank, every rule of choosing among them holds.
        "load_balance_method": "follow_bootstrap_room" if mode == "prefill" else "round_robin",
        "prefill_round_robin_balance": mode == "decode",
        "encoder_only": False,
        "is_embedding": False,
    }
    if mode == "prefill" and manager.control_address is not None:
        found["disaggregation_bootstrap_port"] = int(manager.control_address.rpartition(":")[2])
    return found


def tokenizer_path_of(runtime: Runtime) -> str | None:
    """Return what a client can load the tokenizer from, a path or the model's name; None: there is none."""
    source, model = runtime.source, runtime.config.model
    if source.tokenizer_directory is None:
        return None
    if runtime.config.tokenizer is not None:
        return runtime.config.tokenizer
    return model if model is not None and source.gguf is None else str(source.tokenizer_directory)


def model_path_of(runtime: Runtime) -> str:
    """The path that the served weights were loaded from. Later updates by a trainer do not change it."""
    return runtime.manager.weights.model_path or runtime.config.model or runtime.source.name


def model_info(runtime: Runtime) -> dict[str, Any]:
    """Return the served model and the version of its weights."""
    return {
        "model_path": model_path_of(runtime),
        "tokenizer_path": tokenizer_path_of(runtime),
        "served_model_name": runtime.name,
        "model_type": runtime.source.model_type,
        "architectures": runtime.source.architectures,
        "quantization": runtime.source.config.quantization,
        "is_generation": True,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "preferred_sampling_params": None,
        "weight_version": runtime.manager.weights.version,
        "tp_size": runtime.config.tp,
    }
