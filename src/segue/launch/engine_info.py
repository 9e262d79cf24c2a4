"""What clients are told of a running engine: its options, sizes and weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
from msgspec.structs import asdict

from segue.launch.runtime import Runtime
from segue.version import __version__

SECRETS = ("api_key", "admin_api_key", "pd_key", "register_key", "gms_token", "ssl_keyfile_password")
# Fields of ``internal_states`` that clients read, for features that this engine does not have.
ABSENT_STATE: dict[str, Any] = {
    "pending_dp_reqs_size": 0,
    "prefill_decode_size": 0,
}


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
    return {
        **options,
        "version": __version__,
        "model_path": model_path_of(runtime),
        "served_model_name": runtime.name,
        "status": "ready",
        "max_total_num_tokens": ready.limits.num_pages * ready.limits.page_size,
        "decided": decided,
        "internal_states": [ABSENT_STATE | {"available_kv_tokens_per_dp": [kv_tokens]} | state.state],
    }


def model_path_of(runtime: Runtime) -> str:
    """The path that the served weights were loaded from. Later updates by a trainer do not change it."""
    return runtime.manager.weights.model_path or runtime.config.model or runtime.source.name


def model_info(runtime: Runtime) -> dict[str, Any]:
    """Return the served model and the version of its weights."""
    return {
        "model_path": model_path_of(runtime),
        "served_model_name": runtime.name,
        "model_type": runtime.source.config.architecture,
        "is_generation": True,
        "weight_version": runtime.manager.weights.version,
        "tp_size": runtime.config.tp,
    }
