"""What clients ask about a server: the queries, and its load and configuration in the shapes that they read.

The shapes of loads are SGLang's, and ``vllm_config`` is vLLM's. An engine and a router make them alike: a
router is one engine with a data-parallel rank per worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from segue.messages.control import Counters, Ready
from segue.messages.fleet import MODES
from segue.version import __version__

SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues", "all")
GIB = 1 << 30


class ServerInfoQuery(Struct, frozen=True, kw_only=True):
    """``GET /server_info``; with ``json``, vLLM's, the answer has ``vllm_config``."""

    config_format: Literal["text", "json"] = "text"


class WorldSizeQuery(Struct, frozen=True, kw_only=True):
    """``GET /get_world_size``, vLLM's: whether data-parallel ranks count."""

    include_dp: bool = True


class LoadsQuery(Struct, frozen=True, kw_only=True):
    """``GET /v1/loads``: which sections, separated by commas, and which data-parallel rank (None: all)."""

    include: str | None = None
    dp_rank: Annotated[int, Meta(ge=0)] | None = None
    format: str = "json"

    def __post_init__(self) -> None:
        for name in self.sections:
            if name not in SECTIONS:
                raise ValueError(f"include has {name[:40]!r}; choose of {', '.join(SECTIONS)}")
        if self.format != "json":
            raise ValueError(
                f"format={self.format[:40]!r}: loads come as 'json'; /metrics has Prometheus' form"
            )

    @property
    def sections(self) -> set[str]:
        """The sections that are meant."""
        return {name.strip() for name in (self.include or "all").split(",")}

    def has(self, section: str) -> bool:
        """Whether a section is meant."""
        return not self.sections.isdisjoint((section, "all"))


def load_of(
    state: Mapping[str, Any], ready: Ready, counters: Counters, *, in_flight: int, now: float
) -> dict[str, Any]:
    """Returns the load of an engine, with all sections.

    ``state`` is the scheduler's (`segue.scheduler.internal_state`), and ``in_flight`` the number of requests
    that clients wait for: those that are not with the scheduler yet count as waiting, so that an engine that
    says it has none has none.
    """
    limits, running = ready.limits, state["running_batch_size"]
    waiting = max(state["waiting_queue_size"], in_flight - running)
    uncached, used = state["num_waiting_uncached_tokens"], state["num_used_tokens"]
    capacity = limits.num_pages * limits.page_size
    prompts = max(1, counters.prompt_tokens)
    return {
        "dp_rank": 0,
        "timestamp": now,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": running + waiting,
        "num_waiting_uncached_tokens": uncached,
        "num_used_tokens": used,
        "num_total_tokens": used + uncached,
        "max_total_num_tokens": capacity,
        "token_usage": used / capacity,
        "gen_throughput": state["last_gen_throughput"],
        "cache_hit_rate": counters.cached_tokens / prompts,
        "utilization": running / limits.max_running_requests,
        "max_running_requests": limits.max_running_requests,
        "memory": {
            "weight_gb": ready.weight_bytes / GIB,
            "kv_cache_gb": ready.kv_bytes / GIB,
            "graph_gb": sum(cost.num_bytes for cost in ready.graphs.values()) / GIB,
            "token_capacity": capacity,
        },
        "disaggregation": {
            "mode": MODES[state["role"]],
            "prefill_prealloc_queue_reqs": state["disagg_prefill_bootstrap_queue_size"],
            "prefill_inflight_queue_reqs": state["disagg_prefill_inflight_queue_size"],
            "decode_prealloc_queue_reqs": state["disagg_decode_prealloc_queue_size"],
            "decode_transfer_queue_reqs": state["disagg_decode_transfer_queue_size"],
            "decode_retracted_queue_reqs": 0,
        },
        "queues": {
            "waiting": waiting,
            "grammar": 0,
            "paused": running + waiting if state["engine_paused"] else 0,
            "retracted": state["retracted_queue_size"],
        },
    }


_SECTION_OF = {"memory": "memory", "disaggregation": "disagg", "queues": "queues"}  # by field


def loads(ranks: Sequence[Mapping[str, Any]], query: LoadsQuery, num_accelerators: int) -> dict[str, Any]:
    """Returns the answer of ``/v1/loads`` for the loads of all ranks, in their order.

    ``num_accelerators`` is the number of devices behind one rank. A rank that does not exist has no load.
    """
    asked = [rank for rank in ranks if query.dp_rank in (None, rank["dp_rank"])]
    shown = [
        {
            name: value
            for name, value in rank.items()
            if name not in _SECTION_OF or query.has(_SECTION_OF[name])
        }
        for rank in asked
    ]
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": __version__,
        "dp_rank_count": len(ranks),
        "num_accelerators": num_accelerators,
        "loads": shown,
        "aggregate": {
            "total_running_reqs": sum(rank["num_running_reqs"] for rank in asked),
            "total_waiting_reqs": sum(rank["num_waiting_reqs"] for rank in asked),
            "total_reqs": sum(rank["num_total_reqs"] for rank in asked),
            "avg_token_usage": _mean(asked, "token_usage"),
            "avg_throughput": _mean(asked, "gen_throughput"),
            "avg_utilization": _mean(asked, "utilization"),
        },
    }


def _mean(ranks: Sequence[Mapping[str, Any]], field: str) -> float:
    return float(sum(rank[field] for rank in ranks)) / max(1, len(ranks))


def get_load(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the answer of ``/get_load``, the older form: requests and tokens of each rank."""
    return [
        {
            "dp_rank": rank["dp_rank"],
            "num_reqs": rank["num_total_reqs"],
            "num_waiting_reqs": rank["num_waiting_reqs"],
            "num_tokens": rank["num_total_tokens"],
        }
        for rank in ranks
    ]


def vllm_config(info: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration in vLLM's names, of an answer of ``/server_info``."""
    pages = info["max_total_num_tokens"] // info["page_size"]
    world_size = info["tp_size"] * info["pp_size"]
    return {
        "model_config": {
            "model": info["model_path"],
            "tokenizer": info["tokenizer_path"],
            "served_model_name": info["served_model_name"],
            "dtype": f"torch.{info['dtype']}",
            "max_model_len": info["context_length"],
            "quantization": info.get("quantization"),
            "enforce_eager": info["disable_cuda_graph"],
            "seed": info["seed"],
        },
        "cache_config": {
            "block_size": info["page_size"],
            "num_gpu_blocks": pages,
            "gpu_memory_utilization": info["memory_ratio"],
            "enable_prefix_caching": not info["disable_prefix_cache"],
            "cache_dtype": info.get("kv_cache_dtype", "auto"),
        },
        "parallel_config": {
            "tensor_parallel_size": info["tp_size"],
            "pipeline_parallel_size": info["pp_size"],
            "data_parallel_size": info["dp_size"],
            "enable_expert_parallel": False,
            "world_size": world_size,
            "world_size_across_dp": world_size * info["dp_size"],
        },
        "scheduler_config": {
            "max_num_seqs": info["max_running_requests"],
            "max_num_batched_tokens": info["chunked_prefill_size"],
            "enable_chunked_prefill": True,
            "policy": "fcfs",
        },
        "lora_config": None,
        "speculative_config": None,
    }
